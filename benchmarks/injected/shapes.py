"""What the pairs train, and the fields of a workload that move memory under any strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from injected.field import Field


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained by a base; culprits change it."""

    layers: int
    more_layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    micro_batch: int
    sequence_length: int

    def workload(self) -> dict[str, Any]:
        """Return the section of a spec."""
        names = ("layers", "hidden", "heads", "ffn", "vocab")
        return {
            "model": {name: getattr(self, name) for name in names},
            "micro_batch": self.micro_batch,
            "sequence_length": self.sequence_length,
        }

    def culprits(self) -> list[Field]:
        """Return the fields of the workload."""
        return [
            ("workload.micro_batch", self.micro_batch, 2 * self.micro_batch),
            ("workload.sequence_length", self.sequence_length, 2 * self.sequence_length),
            ("workload.model.layers", self.layers, self.more_layers),
            ("workload.model.hidden", self.hidden, self.hidden * 3 // 2),
            ("workload.model.heads", self.heads, 2 * self.heads),
            ("workload.model.kv_heads", None, 2),
            ("workload.model.ffn", self.ffn, 2 * self.ffn),
            ("workload.model.vocab", self.vocab, self.vocab * 3 // 2),
            ("workload.model.tied_embeddings", False, True),
        ]


TINY = Shape(
    layers=2,
    more_layers=3,
    hidden=256,
    heads=4,
    ffn=704,
    vocab=4096,
    micro_batch=2,
    sequence_length=128,
)
SMALL = Shape(
    layers=4,
    more_layers=6,
    hidden=1024,
    heads=16,
    ffn=2816,
    vocab=16384,
    micro_batch=2,
    sequence_length=512,
)
SHAPES = {"cpu": TINY, "cuda": SMALL}
"""Device -> what is trained on it: a GPU needs more than a few of its segments."""
