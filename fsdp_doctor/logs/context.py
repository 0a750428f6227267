"""What stands around a failure: the lines of the same rank, their frames, the last step."""

from __future__ import annotations

import re
from functools import cached_property

from fsdp_doctor.logs.allocator import fragmentation
from fsdp_doctor.logs.frames import frames_in, phase_of
from fsdp_doctor.logs.prefix import split_prefix, time_in
from fsdp_doctor.logs.progress import FAMILIES
from fsdp_doctor.logs.progress.tqdm_bars import is_training
from fsdp_doctor.logs.reader import text_of
from fsdp_doctor.logs.records import Failure, Message, Origin
from fsdp_doctor.logs.sources import LogFile
from fsdp_doctor.model.memory import Phase

_LINES_BEFORE = 240
_LINES_AFTER = 40
_BREAK = re.compile(r"[\r\n]+")
_MARKERS: tuple[tuple[Phase, re.Pattern[str]], ...] = tuple(
    (phase, re.compile(pattern, re.IGNORECASE))
    for phase, pattern in (
        (Phase.LOAD, r"Loading checkpoint shards|loading (?:the )?(?:model|weights)"),
        (
            Phase.CHECKPOINT_SAVE,
            r"saving (?:model )?checkpoint|save_checkpoint|saving (?:model|state)",
        ),
        (
            Phase.CHECKPOINT_LOAD,
            r"loading checkpoint from|resuming from|loading (?:release|distributed) checkp",
        ),
        (Phase.EVALUATION, r"\*{3,} Running (?:Evaluation|Prediction)|evaluating on|validation:"),
        (Phase.GRAPH_CAPTURE, r"capturing (?:cuda ?)?graphs?|start cuda graphs? capture"),
        (Phase.GENERATION, r"generate_sequences|rollout"),
    )
)
_CODE = re.compile(r"^\s{4,}(?:return |\w+ = ).*\b(?:torch|F|self|nn)\.")
"""A source line of a traceback that was cut: tensor arithmetic."""
_TELLING = 24
"""Lines away from a failure that a marker still tells its phase."""


class Context:
    """A line in a window of a log and, on demand, the lines of the same rank around it."""

    def __init__(self, window: bytes, start: int, before: int, after: int) -> None:
        end = window.find(b"\n", start)
        end = len(window) if end < 0 else end
        self._before = window[max(0, start - before) : start]
        self._after = window[end + 1 : end + 1 + after]
        # of a progress bar redrawn in one line only what is left standing at the end matters
        self.line = _last_part(text_of(window[start:end]))

    @cached_property
    def rank(self) -> int | None:
        """The rank that the line's prefix tells."""
        return split_prefix(self.line)[0].rank

    @cached_property
    def neighbour_rank(self) -> int | None:
        """The rank of the next or the previous line, where its prefix tells one."""
        for line in (
            text_of(self._after[:600]).lstrip("\n").partition("\n")[0],
            text_of(self._before[-600:]).rstrip("\n").rpartition("\n")[2],
        ):
            rank = split_prefix(line)[0].rank if "rank" in line.lower() else None
            if rank is not None:
                return rank
        return None

    @cached_property
    def lines_before(self) -> list[str]:
        """Lines before, oldest first, without those of other ranks."""
        lines = _BREAK.split(text_of(self._before).rstrip("\r\n"))[-_LINES_BEFORE:]
        return self._own(lines)

    @cached_property
    def lines_after(self) -> list[str]:
        """Lines after, without those of other ranks."""
        return self._own(_BREAK.split(text_of(self._after))[:_LINES_AFTER])

    def _own(self, lines: list[str]) -> list[str]:
        kept = []
        for line in lines:
            origin, text = split_prefix(line)
            if self.rank is None or origin.rank is None or origin.rank == self.rank:
                kept.append(text)
        return kept

    @cached_property
    def frames(self) -> list[str]:
        """The frames of the traceback that ends here, else of the one that follows."""
        found = frames_in(self.lines_before[-200:])
        return found or frames_in(self.lines_after)

    @cached_property
    def step(self) -> int | None:
        """The last step that a progress line before tells."""
        best: tuple[int, bytes] | None = None
        for family in FAMILIES:
            if family.marker not in self._before:
                continue
            for match in family.matches(self._before):
                text = _step_text(family.name, match)
                if text and (best is None or match.start() > best[0]):
                    best = (match.start(), text)
        return int(best[1]) if best is not None and len(best[1]) < 16 else None

    @cached_property
    def time(self) -> float | None:
        """The time of the nearest line before that tells one."""
        for line in reversed(self.lines_before[-40:]):
            found = time_in(line)
            if found is not None:
                return found
        return None

    def marker_phase(self) -> Phase:
        """Return the phase that the nearest telling line shows."""
        pairs = [(i, line) for i, line in enumerate(reversed(self.lines_before[-_TELLING:]))]
        pairs += list(enumerate(self.lines_after[:6]))
        for _, line in sorted(pairs, key=lambda pair: pair[0]):
            for phase, pattern in _MARKERS:
                if pattern.search(line) is not None:
                    return phase
        return Phase.UNKNOWN


def _last_part(line: str) -> str:
    parts = [part for part in line.split("\r") if part.strip()]
    return parts[-1] if parts else line


def _step_text(family: str, match: re.Match[bytes]) -> bytes:
    groups = match.groups()
    if family == "progress bar":
        return groups[1] if is_training(groups[0]) else b""
    if family in ("megatron memory", "bridge memory"):
        return groups[1] or b""
    if family == "deepspeed timer":
        return groups[0] or groups[1] or b""
    return b"" if family in ("deepspeed memory", "memory metric") else groups[0] or b""


_COLLECTIVE = frozenset(
    {"elastic", "slurm", "srun", "srun-killed", "kernel", "cgroup", "deepspeed-kill"}
)
"""Forms that a launcher prints, whose own rank or place in the stream says nothing."""


def make_failure(
    message: Message,
    origin: Origin,
    context: Context,
    file: LogFile,
    line: int,
    *,
    light: bool = False,
) -> Failure:
    """Join what the message, the line's prefix, the lines around and the file's name tell.

    ``light``: without the lines around.
    """
    named = file.origin
    values = {name: getattr(message, name) for name in Message.__slots__}
    failure = Failure(
        **values, file=file.name, line=line, text=split_prefix(context.line)[1].strip()[:500]
    )
    sources = (origin, named)
    if failure.rank is None and message.form not in _COLLECTIVE:
        ranks = (origin.rank, named.rank, context.neighbour_rank)
        failure.rank = next((rank for rank in ranks if rank is not None), None)
    for name in ("local_rank", "host", "pid"):
        if getattr(failure, name) is None:
            told = [getattr(source, name) for source in sources]
            setattr(failure, name, next((v for v in told if v is not None), None))
    failure.time = message.time or origin.time
    if not light:
        failure.time = failure.time or context.time
        if message.kind != "host_oom_kill" and message.fatal:
            failure.frames = context.frames
        if not message.victim:
            _describe(failure, context)
    failure.fragmentation = fragmentation(failure) if failure.kind == "device_oom" else "unknown"
    return failure


def _describe(failure: Failure, context: Context) -> None:
    """Add the phase and the words around the failure."""
    lines = [*context.lines_before[-40:], context.line, *context.lines_after[:14]]
    failure.context = "\n".join(line[:400] for line in lines).lower()[-12_000:]
    phase = phase_of("\n".join(failure.frames)) if failure.frames else Phase.UNKNOWN
    if phase is Phase.UNKNOWN:
        phase = _phase_of_neighbours(context)
    failure.phase = str(phase)


def _phase_of_neighbours(context: Context) -> Phase:
    own = phase_of(context.line) if "Failed to clone() tensor" in context.line else Phase.UNKNOWN
    if own is not Phase.UNKNOWN:
        return own
    marked = context.marker_phase()
    if marked is not Phase.UNKNOWN:
        return marked
    # without a traceback a source line before, or a worker's method after, may tell
    near = [*context.lines_before[-2:], *context.lines_after[:14]]
    found = phase_of("\n".join(line for line in near if "%|" not in line))
    if found is Phase.UNKNOWN and any(_CODE.match(line) for line in context.lines_before[-1:]):
        return Phase.FORWARD
    return found
