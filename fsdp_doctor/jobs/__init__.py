"""Jobs that this tool did not run: their logs read as runs with fewer columns.

A log's argument dump becomes the config, its iteration and memory lines become steps, its failures
become the run's failure. Nothing in a log is executed.
"""

from fsdp_doctor.jobs.job_log import Job, read_job
from fsdp_doctor.jobs.kinds import Kind, kind_of

__all__ = ["Job", "Kind", "kind_of", "read_job"]
