"""Take secrets, and what places and people are called, out of text that is passed on.

Text is a job's own words: nothing is known of its form, so each pattern is bounded, and a name too
many is rather replaced than one too few.
"""

from __future__ import annotations

import re

from fsdp_doctor.redact import REDACTED, redact_text, short_path

_KEYWORD = (
    r"[\w.-]{0,40}(?:token|secret|passw(?:or)?d|pwd|api[_-]?key|access[_-]?key|account[_-]?key"
    r"|private[_-]?key|credential|cookie)[\w.-]{0,40}"
)
_ASSIGNED = re.compile(
    rf"(?i)(?<![\w-])(-{{0,2}}{_KEYWORD})([\"']?\s{{0,4}}(?:[=:]|\s)\s{{0,4}})"
    r"(\"[^\"]{0,400}\"|'[^']{0,400}'|[^\s\"']{1,400})"
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s{1,4}[\w.~+/=-]{8,}")
_QUERY = re.compile(r"(?i)([?&](?:sig|signature|key|token|x-amz-[\w-]{1,40})=)[^&\s\"']{1,400}")
_KEY_BLOCK = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*", re.DOTALL)
_HEX_KEY = re.compile(r"\b[0-9a-f]{40}\b")
"""A W&B key; a commit looks the same and is no loss."""
_COUNT = re.compile(r"[\d.,]{1,15}[kKMGB]?")

_MAIL = re.compile(r"\b[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+")
_USER = re.compile(r"(?i)\b((?:user(?:name)?|login|owner|uid)\s?[=:]\s?)[\w.@-]{1,64}")
_BUCKET = re.compile(
    r"\b(?:s3a?|gs|gcs|hdfs|abfss?|az|oss|cos|file|nfs|lustre):/{2,3}[^\s\"'<>|]{1,400}"
)
_URL = re.compile(r"\b(?:https?|ssh|git|tcp|ftp|wss?|grpc)://([^\s/\"'<>]{1,255})[^\s\"'<>]{0,400}")
_PATH = re.compile(
    r"(?<![\w./])(?:~\w{0,32}|\.{0,2})/(?:[\w.@+=:,-]{1,255}/)+[\w.@+=-]{0,255}"
    r"|(?<!\w)[A-Za-z]:\\(?:[\w.-]{1,64}(?: [\w.-]{1,64}){0,3}\\){0,20}[\w.-]{0,255}"
    r"|\\\\[\w.-]{1,64}\\[\w.\\-]{1,255}"
)
_ADDRESS = re.compile(
    r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?::\d{1,5})?"
    r"|(?<![\w:])\[?(?:[0-9a-fA-F]{1,4}:{1,2}){2,7}[0-9a-fA-F]{1,4}(?:%\w{1,16})?(?![\w:])\]?"
    r"|(?<![\w:])::(?:[0-9a-fA-F]{1,4}:?){1,7}(?![\w:])"
)
_CLOCK = re.compile(r"\d{1,2}:\d\d:\d\d")
_HOST = re.compile(
    r"(?i)\b(?<![/.])(?:[a-z0-9]{1,24}[-_]){0,4}"
    r"(?:node|host|dgx|hgx|compute|login|nid|server|worker|pod|ip)"
    r"(?:[-_]?[a-z]{0,12}[-_]?\d{1,12}){1,6}(?:[-_][a-z0-9]{1,24}){0,4}\b"
)
_NO_HOST = re.compile(
    r"(?i)host-\d+|(?:num_|n_?)?(?:nodes?|workers?|host)(?:_rank|_count)?[-_]?\d?"
)
"""An alias, a count of nodes, or a worker of a data loader: no machine."""
_DOMAIN = re.compile(
    r"(?i)(?<![\w@/.-])(?:[a-z0-9][\w-]{0,62}\.){1,8}"
    r"(?:com|org|net|edu|gov|internal|local|localdomain|lan|corp|intra|cluster)\b(?!\.?\w)"
)
_PUBLIC = ("pytorch.org", "nvidia.com", "github.com", "python.org")


def without_secrets(text: str) -> str:
    """Return a text without tokens, keys and passwords."""
    text = _ASSIGNED.sub(_assigned, redact_text(text))
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _QUERY.sub(rf"\1{REDACTED}", text)
    return _HEX_KEY.sub(REDACTED, _KEY_BLOCK.sub(REDACTED, text))


def without_names(text: str) -> str:
    """Return a text without paths, hosts, addresses and users."""
    text = _MAIL.sub("[address]", text)
    text = _URL.sub(_url, _BUCKET.sub("[path]", text))
    text = _PATH.sub(lambda found: _shortened(found[0]), text)
    text = _ADDRESS.sub(lambda f: f[0] if _CLOCK.fullmatch(f[0]) else "[address]", text)
    text = _DOMAIN.sub(_domain, text)
    text = _HOST.sub(lambda f: f[0] if _NO_HOST.fullmatch(f[0]) else "[host]", text)
    return _USER.sub(r"\1[user]", text)


def _assigned(found: re.Match[str]) -> str:
    """Replace a secret's value; a plain number of tokens is none, and prose is not either."""
    name, between, value = found.groups()
    if "token" in name.lower() and _COUNT.fullmatch(value.strip("\"',;")):
        return found[0]
    if between.isspace() and not name.startswith("-"):
        return found[0]
    return f"{name}{between}{REDACTED}"


def _domain(found: re.Match[str]) -> str:
    return found[0] if _public(found[0]) else "[host]"


def _url(found: re.Match[str]) -> str:
    return found[0] if _public(found[1]) else "[address]"


def _public(host: str) -> bool:
    name = host.lower()
    return any(name == one or name.endswith(f".{one}") for one in _PUBLIC)


def _shortened(path: str) -> str:
    path = path.replace("\\", "/")
    inside = short_path(path)
    if inside != path:
        return inside
    return path.rstrip("/").rpartition("/")[2] or "..."
