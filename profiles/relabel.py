"""Name what Megatron-FSDP gathered and queued in runs that were recorded before the rules for it.

    python profiles/relabel.py RUN... [--shared-gpu]

A run keeps the Python frames of the largest blocks at its peak. This moves the bytes of those whose
frames say what they are (the rules of fsdp_doctor/memory/mechanisms.py; buffers made while wrapping
by the lines of megatron_fsdp 0.6.1, the same file as in megatron-core 0.19.2) to their category: at
the peak and in its phase, and where a block is never freed in the other phases of a step too. No
byte is added or lost. Frames lose the folder that the packages lay in.

Other phases keep what was said of blocks that live for a moment. A second time it changes nothing.
``--shared-gpu``: the device's used memory is another job's too and is taken out; a warning says
that no time means anything.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from fsdp_doctor.memory.events import Label
from fsdp_doctor.memory.mechanisms import by_frames
from fsdp_doctor.model.memory import Category

SHARED = "Recorded beside other jobs on the same GPU: bytes are exact, no time here means anything."
_FOLDER = re.compile(r"^/\S*?/(?=megatron(?:_fsdp)?/)")
_FOLDER_IN_TEXT = re.compile(r'"/[^" ]*?/(?=megatron(?:_fsdp)?/)')
_BUFFER = "megatron_fsdp/param_and_grad_buffer.py"
_GATHERED = Label(Category.UNSHARDED_PARAMETERS, "gathered_unit")
_WRAP = {
    "2846": Label(Category.PARAMETERS, "weight_buffer"),
    "2849": _GATHERED,
    "2876": Label(Category.OPTIMIZER_STATE, "main_parameters"),
    "3028": Label(Category.GRADIENTS, "main_gradients"),
}
"""Line of ``_init_each_parameter_group_buffers`` -> what it makes."""
_STEP = ("optimizer", "data", "forward", "backward")


def label_of(top: dict[str, Any]) -> Label | None:
    """What the frames of a block say, where nobody knew its holder."""
    if top["subcategory"] not in (None, "persistent"):
        return None
    for frame in top["frames"]:
        place, _, function = frame.rpartition(" ")
        path, _, line = place.rpartition(":")
        if function == "_init_each_parameter_group_buffers" and path.endswith(_BUFFER):
            return _WRAP.get(line)
    told = by_frames(tuple(top["frames"]))
    ours = any(_BUFFER in frame for frame in top["frames"])
    return told if ours else None


def move(categories: dict[str, int], size: int, old: str, new: str) -> None:
    """Move bytes from one category to another."""
    left = categories.get(old, 0) - size
    if left < 0:
        raise ValueError(f"{size} bytes of {old}, of which there are {categories.get(old, 0)}")
    categories[old] = left
    categories[new] = categories.get(new, 0) + size


def relabel(anatomy: dict[str, Any]) -> int:
    """Change one anatomy in place; return the bytes that moved."""
    moved = 0
    made: dict[str, int] = {}
    peak = anatomy["phases"][anatomy["peak_phase"]]
    lasting = [anatomy["phases"][p]["categories"] for p in _STEP if p in anatomy["phases"]]
    for top in anatomy["top_allocations"]:
        top["frames"] = [_FOLDER.sub("", frame) for frame in top["frames"]]
        label = label_of(top)
        if label is None:
            continue
        old, size, new = top["category"], top["bytes"], label.category.value
        top["category"], top["subcategory"] = new, label.subcategory
        if label in _WRAP.values() and label != _GATHERED:
            made[new] = made.get(new, 0) + size
        if old == new:
            continue
        kept = top["phase"] == "wrap" or top["step"] < anatomy["step"]
        if kept and old in anatomy["expected_bytes"]:
            anatomy["expected_bytes"][old] -= size
        places = [*lasting, anatomy["resident"]] if kept else [peak["categories"]]
        for categories in (anatomy["categories"], *places):
            move(categories, size, old, new)
        moved += size
    if made:  # the standalone package: its buffers are what is held, beside Adam's moments
        moments = anatomy["expected_bytes"]["optimizer_state"]
        made["optimizer_state"] = made.get("optimizer_state", 0) + moments
        anatomy["expected_bytes"] = made
    for categories in (anatomy["categories"], anatomy["resident"], *lasting):
        largest = sorted(categories.items(), key=lambda item: (item[0] == "rounding", -item[1]))
        categories.clear()
        categories.update(item for item in largest if item[1])
    return moved


def main() -> None:
    """Rewrite the records of each run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--shared-gpu", action="store_true")
    chosen = parser.parse_args()
    for run in chosen.runs:
        manifest = run / "run.json"
        about = json.loads(manifest.read_text(encoding="utf-8"))
        if chosen.shared_gpu and SHARED not in about["warnings"]:
            about["warnings"].append(SHARED)
            manifest.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for path in sorted(run.glob("rank-*.jsonl")):
            lines = []
            for text in path.read_text(encoding="utf-8").splitlines():
                line = text
                record = json.loads(text)
                if record["record"] == "anatomy":
                    moved = relabel(record)
                    line = json.dumps(record, separators=(",", ":"))
                    print(f"{path}: {moved:,} bytes")
                elif chosen.shared_gpu and record.get("device_used_bytes") is not None:
                    line = json.dumps(record | {"device_used_bytes": None}, separators=(",", ":"))
                lines.append(_FOLDER_IN_TEXT.sub('"', line))
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
