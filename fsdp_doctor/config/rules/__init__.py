"""Validity rules of the frameworks: data files beside an engine that never runs their text."""

from fsdp_doctor.config.rules.engine import CheckResult, Undecided, check_config
from fsdp_doctor.config.rules.schema import RuleBook, RuleFileError, load_rules
from fsdp_doctor.config.rules.view import Job

__all__ = [
    "CheckResult",
    "Job",
    "RuleBook",
    "RuleFileError",
    "Undecided",
    "check_config",
    "load_rules",
]
