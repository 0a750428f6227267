"""The built-in workload: a Llama-shaped decoder (RMSNorm, rotary positions, grouped-query
attention through SDPA, SwiGLU), without biases and without dropout.

``config.model_sizes_from_shape`` counts the same parameters without torch.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from fsdp_doctor.model.spec import ModelSpec


class Attention(nn.Module):
    """Causal self-attention with rotary positions; shapes (batch, sequence, hidden)."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        self.query = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.key = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.value = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.output = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return attention over ``x``."""
        batch, length, _ = x.shape
        query = self._split(self.query(x), self.heads, batch, length)
        key = self._split(self.key(x), self.kv_heads, batch, length)
        value = self._split(self.value(x), self.kv_heads, batch, length)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if self.kv_heads != self.heads:
            groups = self.heads // self.kv_heads
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, length, -1))
        return output

    def _split(self, x: torch.Tensor, heads: int, batch: int, length: int) -> torch.Tensor:
        return x.view(batch, length, heads, self.head_dim).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embedding (Su et al. 2021, arXiv:2104.09864) to the last dimension."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, ffn, bias=False)
        self.up = nn.Linear(hidden, ffn, bias=False)
        self.down = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the feed-forward of ``x``."""
        output: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return output


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(hidden)
        self.attention = Attention(hidden, heads, kv_heads)
        self.norm2 = nn.RMSNorm(hidden)
        self.ffn = FeedForward(hidden, ffn)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return ``x`` after attention and feed-forward, both residual."""
        x = x + self.attention(self.norm1(x), cos, sin)
        output: torch.Tensor = x + self.ffn(self.norm2(x))
        return output


class GPT(nn.Module):
    """Token ids (batch, sequence) -> logits (batch, sequence, vocab)."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, spec: ModelSpec, sequence_length: int) -> None:
        super().__init__()
        kv_heads = spec.kv_heads or spec.heads
        ffn = spec.ffn or 4 * spec.hidden
        self.rotary_dim, self.sequence_length = spec.hidden // spec.heads, sequence_length
        self.embedding = nn.Embedding(spec.vocab, spec.hidden)
        self.blocks = nn.ModuleList(
            Block(spec.hidden, spec.heads, kv_heads, ffn) for _ in range(spec.layers)
        )
        self.norm = nn.RMSNorm(spec.hidden)
        self.head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        if spec.tied_embeddings:
            self.head.weight = self.embedding.weight
        cos, sin = self._rotary_tables()
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _rotary_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        exponent = torch.arange(0, self.rotary_dim, 2).float() / self.rotary_dim
        positions = torch.arange(self.sequence_length).float()
        angles = torch.outer(positions, 1.0 / (10000.0**exponent))
        return angles.cos(), angles.sin()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill parameters and buffers in place; needed after ``to_empty`` of a meta-built model."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
        device = self.cos.device
        cos, sin = self._rotary_tables()
        self.cos, self.sin = cos.to(device), sin.to(device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return next-token logits."""
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over the vocabulary in float32, mean over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
