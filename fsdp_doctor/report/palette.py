"""One colour per category, in every plot and table.

Okabe & Ito's colours (distinguishable with the common colour blindnesses) for what a rank keeps;
the transient kin of a category has the same hue, lighter. All are readable on white and on black.
"""

from __future__ import annotations

CATEGORY_COLORS = {
    "parameters": "#0072b2",
    "unsharded_parameters": "#7fb8da",
    "gradients": "#d55e00",
    "unsharded_gradients": "#f0a878",
    "optimizer_state": "#009e73",
    "activations": "#cc79a7",
    "logits": "#8c4a73",
    "communication": "#e0c120",
    "temporaries": "#a0763c",
    "inputs": "#56b4e9",
    "buffers": "#4f9d9d",
    "rounding": "#c2c2c2",
    "unknown": "#888888",
    "reserved_unallocated": "#a8a8c8",
    "outside_pytorch": "#777799",
}
OTHER_COLOR = "#666666"
"""A category that this version does not know."""
TIME_COLORS = {
    "kernels": "#0072b2",
    "exposed communication": "#d55e00",
    "copies": "#e0c120",
    "idle": "#bbbbbb",
}
SIDE_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#a0763c", "#56b4e9")


def category_color(category: str) -> str:
    """Return the colour of a category."""
    return CATEGORY_COLORS.get(category, OTHER_COLOR)


def category_order(category: str) -> int:
    """Return where a category stands in a stack, from the bottom."""
    names = list(CATEGORY_COLORS)
    return names.index(category) if category in CATEGORY_COLORS else len(names)
