"""Read logs: every failure with its numbers, place, phase, and the history of the job."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdp_doctor.errors import InputError
from fsdp_doctor.logs.context import Context, make_failure
from fsdp_doctor.logs.elastic import error_file_text
from fsdp_doctor.logs.history import History
from fsdp_doctor.logs.messages import note_of, read_message
from fsdp_doctor.logs.prefix import split_prefix
from fsdp_doctor.logs.progress import Family
from fsdp_doctor.logs.progress_scan import ProgressScanner
from fsdp_doctor.logs.reader import opened, pieces, text_of
from fsdp_doctor.logs.records import Failure, Note
from fsdp_doctor.logs.sources import LogFile
from fsdp_doctor.logs.triggers import trigger_lines

BEFORE = 32 << 10
AFTER = 8 << 10
MAX_FAILURES = 20_000
MAX_NOTES = 2_000
MAX_CONTEXTS = 300
"""Failures of a file whose surroundings are read; further ones keep their message alone."""
_LIGHT = ("recovered", "preempted-w")
"""Forms that come by the thousand and need no surroundings."""
_RETRY = "failed with OOM on device"
_RECENT = 64
"""With so many failures before it a failure is compared, to tell repetitions."""


@dataclass(slots=True)
class ScannedLogs:
    """Everything read from the logs of one job."""

    failures: list[Failure] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    history: History = field(default_factory=History)
    files: int = 0
    bytes: int = 0
    lines: int = 0
    tracebacks: bool = False
    left_out: int = 0
    """Failures beyond ``MAX_FAILURES``."""
    warnings: list[str] = field(default_factory=list)
    dense: Family | None = None
    """The family of progress lines that filled the last file."""
    tail: str = ""
    """The end of the last file."""


def scan_logs(files: Sequence[LogFile]) -> ScannedLogs:
    """Read the logs, one after the other. Raises InputError when none can be read."""
    result = ScannedLogs()
    for file in files:
        try:
            _FileScan(file, result).run()
        except OSError as error:
            if len(files) == 1:
                raise InputError(error.strerror or str(error), where=file.name) from None
            result.warnings.append(f"{file.name}: {error.strerror or error}")
    return result


class _FileScan:
    """One file, piece by piece, with a view of what stands before and after."""

    def __init__(self, file: LogFile, result: ScannedLogs) -> None:
        self.file = file
        self.result = result
        self.progress = ProgressScanner(result.history, file.origin.rank, result.dense)
        self.line = 1
        self.hits = 0
        self.retry: Failure | None = None
        self.recent: deque[Failure] = deque(maxlen=_RECENT)
        self.steps: dict[int | None, int | None] = {}
        self.last_time: float | None = None

    def run(self) -> None:
        self.result.files += 1
        with opened(self.file.path) as stream:
            before, current = b"", b""
            for piece in self._texts(pieces(stream)):
                self.result.bytes += len(piece)
                if current:
                    self._piece(before, current, piece[:AFTER])
                    before = current[-BEFORE:]
                current = piece
            if current:
                self._piece(before, current, b"")
                self.result.tail = text_of(current[-4096:])
        self.result.dense = self.progress.dense

    @staticmethod
    def _texts(stream: Iterator[bytes]) -> Iterator[bytes]:
        """Replace a torchrun error file by the text it holds."""
        for number, piece in enumerate(stream):
            text = error_file_text(piece) if number == 0 and piece[:1] == b"{" else None
            yield piece if text is None else text

    def _piece(self, before: bytes, piece: bytes, after: bytes) -> None:
        history = self.result.history
        self.steps = {rank: one.last_step for rank, one in history.ranks.items()}
        remainder = self.progress.take(piece)
        position, line = 0, self.line
        window: bytes | None = None
        for offset in trigger_lines(remainder.data, remainder.shapes):
            start = remainder.origin(offset)
            start = piece.rfind(b"\n", 0, start) + 1
            line += piece.count(b"\n", position, start)
            position = start
            window = window or before + piece + after
            self._hit(window, len(before) + start, line)
        if b"Traceback (most recent call last)" in remainder.data:
            self.result.tracebacks = True
        lines = piece.count(b"\n")
        self.line += lines
        self.result.lines += lines + (not piece.endswith(b"\n"))

    def _hit(self, window: bytes, start: int, line: int) -> None:
        context = Context(window, start, BEFORE, AFTER)
        if self.retry is not None and self.hits > MAX_CONTEXTS and _RETRY in context.line:
            self.retry.repeats += 1  # whose it is does not matter any more
            return
        origin, text = split_prefix(context.line)
        note = note_of(text)
        if note is not None:
            self._note(
                Note(
                    name=note[0],
                    text=text[:300],
                    file=self.file.name,
                    line=line,
                    rank=origin.rank,
                    values=note[1],
                )
            )
            return
        message = read_message(text, context)
        if message is None:
            return
        self.hits += 1
        light = message.form.startswith(_LIGHT) or self.hits > MAX_CONTEXTS
        failure = make_failure(message, origin, context, self.file, line, light=light)
        step = None if light else context.step
        failure.iteration = step if step is not None else self._step(failure.rank)
        self._add(failure)
        if failure.form == "recovered-retry":
            self.retry = self.retry or failure

    def _step(self, rank: int | None) -> int | None:
        return self.steps.get(rank, self.steps.get(None))

    def _add(self, failure: Failure) -> None:
        for other in self.recent:
            if same_failure(other, failure):
                absorb(other, failure)
                return
        if len(self.result.failures) >= MAX_FAILURES:
            self.result.left_out += 1
            return
        failure.order = len(self.result.failures)
        self.recent.append(failure)
        self.result.failures.append(failure)

    def _note(self, note: Note) -> None:
        if len(self.result.notes) < MAX_NOTES:
            self.result.notes.append(note)


_NUMBERS = ("requested_bytes", "total_bytes", "free_bytes", "allocated_bytes", "reserved_bytes")


def same_failure(a: Failure, b: Failure) -> bool:
    """Return whether a message is another print of the same failure."""
    if a.kind != b.kind or (a.fatal != b.fatal and a.form == b.form):
        return False
    if a.kind == "not_memory" and a.form != b.form:
        return False
    for name in ("rank", "pid", "host", "device", "local_rank"):
        x, y = getattr(a, name), getattr(b, name)
        if x is not None and y is not None and x != y:
            return False
    if a.form == b.form == "recovered-retry":
        return True
    numbers = [[getattr(one, name) for name in _NUMBERS] for one in (a, b)]
    empty = [all(value is None for value in values) for values in numbers]
    if a.kind == "host_oom_kill":
        return a.pid is not None and a.pid == b.pid
    return numbers[0] == numbers[1] or (b.form == "bare" and empty[1])


def absorb(kept: Failure, again: Failure) -> None:
    """Take from a repetition what the first print did not tell."""
    kept.repeats += 1
    for name in ("rank", "local_rank", "host", "pid", "time", "device", "iteration", "exit_code"):
        if getattr(kept, name) is None:
            setattr(kept, name, getattr(again, name))
    if not kept.frames and again.frames:
        kept.frames = again.frames
        if kept.phase == "unknown":
            kept.phase = again.phase
    kept.fatal = kept.fatal or again.fatal
