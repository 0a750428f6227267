"""The scores and the table of all pairs, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_doctor.config.megatron_support import installed_versions
from fsdp_doctor.model.run import RunManifest
from injected.judge import GOALS, NAMED, Row, Truth

_HEAD = """# Injection benchmark: which flag did it

Written by `{command}`.

Each pair of specs differs in 1 to 6 fields: culprits that may move memory, and decoys that are
inert, cosmetic or without effect on memory; {shared}. True shares are
Shapley values of the peak over real runs of every combination of the culprits (a rank of {ranks} on
{device});
decoys are shown to be harmless by runs of A with all of them and of B without. `compare` sees the
runs of A and B alone and simulates what lies between. "Simulated": the points of its design; 0
where one field alone differs, whose pair of runs settles it. Run with {run};
simulated with {simulated}.

"""
_SHARED = "up to two more fields have an unusual value on both sides"
_NONE_SHARED = "all others have their usual value"


def head(command: str, rows: Sequence[Row], runs: Sequence[RunManifest]) -> str:
    """Return what the table is; ``runs``: those it rests on."""
    first = runs[0]
    device = "the CPU, counted by the CPU tracker"
    if first.device_type == "cuda":
        device = f"one {first.device_name or 'GPU'}"
    return _HEAD.format(
        command=command,
        ranks=first.world_size,
        shared=_SHARED if any(row.pair.shared for row in rows) else _NONE_SHARED,
        device=device,
        run=_versions((run.environment for run in runs), ("torch", "megatron_core")),
        simulated=_versions([installed_versions()], ("torch", "megatron-core")),
    )


def _versions(known: Iterable[Mapping[str, Any]], packages: Sequence[str]) -> str:
    """Return every version of these packages that occurs."""
    found = {
        f"{name.replace('_', '-')} {facts[name]}"
        for facts in known
        for name in packages
        if facts.get(name) is not None
    }
    return ", ".join(sorted(found))


def report(
    rows: Sequence[Row], drawn_anew: Counter[str], not_judged: Mapping[int, str], seed: int
) -> str:
    """Return the scores and the table of all pairs; ``not_judged``: pair -> why."""
    count = len(rows)
    top = sum(row.top_is_right for row in rows) / count
    found = sum(row.all_found for row in rows) / count
    decoys = sum(row.worst_decoy > NAMED for row in rows)
    error = sum(row.error for row in rows) / count
    kinds = Counter(row.pair.strategy for row in rows)
    lines = [
        f"{count} pairs (seed {seed}): "
        + ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
        + f"; {sum(len(r.pair.culprits) for r in rows)} culprits, "
        f"{sum(len(r.pair.decoys) for r in rows)} decoys. Drawn anew: "
        + (", ".join(f"{n} ({why})" for why, n in sorted(drawn_anew.items())) or "none")
        + ".",
        "",
        "| score | goal | result |",
        "|---|---|---|",
        f"| top cause right | {GOALS['top']:.0%} | {top:.1%} |",
        f"| all culprits found | {GOALS['all']:.0%} | {found:.1%} |",
        f"| pairs with a decoy blamed for more than {NAMED:.0%} | 0 | {decoys} |",
        f"| mean error of a culprit's share | {GOALS['error']:.0%} | {error:.2%} |",
        "",
        "| pair | strategy | change of the peak | culprits: true share, said | decoys, most blamed "
        "| simulated | missed |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [line(row) for row in rows]
    if not_judged:
        lines += ["", "Not judged:", ""]
        lines += [f"- pair {number}: {why}" for number, why in sorted(not_judged.items())]
    return "\n".join(lines) + "\n"


def line(row: Row) -> str:
    """Return a pair's line of the table."""
    culprits = "<br>".join(
        f"`{key.removeprefix('config.')}` {value:.1%}, {row.said.get(key, 0.0):.1%}"
        for key, value in sorted(row.true.items(), key=lambda item: -abs(item[1]))
    )
    decoys = f"{len(row.pair.decoys)}, {row.worst_decoy:.1%}" if row.pair.decoys else "0"
    change = f"{row.delta / (1 << 20):+.1f} MiB"
    cells = (row.pair.number, row.pair.strategy, change, culprits, decoys, row.points)
    return f"| {' | '.join(map(str, cells))} | {', '.join(row.problems()) or '-'} |"


def truth_line(truth: Truth) -> str:
    """Return what is known of a pair before it is judged."""
    shares = ", ".join(f"{key} {value:.1%}" for key, value in truth.shares.items())
    decoys = len(truth.pair.decoys)
    change = truth.delta / (1 << 20)
    return (
        f"pair {truth.pair.number}, {truth.pair.strategy}: {change:+.1f} MiB; {shares}; "
        f"{decoys} decoys"
    )
