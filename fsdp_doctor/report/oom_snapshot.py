"""What a post-mortem says about the memory snapshot of the failure."""

from __future__ import annotations

from fsdp_doctor.postmortem import PostMortem
from fsdp_doctor.report.document import Section
from fsdp_doctor.report.snapshot_document import (
    categories_section,
    ranks_section,
    request_section,
)
from fsdp_doctor.report.snapshot_replays import replay_section
from fsdp_doctor.report.snapshot_tables import (
    growth_section,
    space_sections,
    steps_section,
    tops_section,
)


def snapshot_sections(result: PostMortem) -> list[Section]:
    """Return the sections of the snapshot, none where there is no snapshot."""
    shown = result.snapshot
    if shown is None:
        return []
    sections = [categories_section(shown)]
    if shown.oom is not None:
        sections.append(request_section(shown, shown.oom))
    if len(result.snapshots) > 1:
        sections.append(ranks_section(result.snapshots, shown))
    return [
        *sections,
        *replay_section(shown),
        *tops_section(shown),
        *steps_section(shown),
        *growth_section(shown),
        *space_sections(shown),
    ]
