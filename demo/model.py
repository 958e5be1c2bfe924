"""What the demo trains: a small causal transformer that learns to spell a made-up shoreline language.

The text of a step depends on the step number alone, never on the number of processes, so that every job sees
the same global batch and their losses can be compared.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALPHABET = "abcdefghijklmnopqrstuvwxyz .\n"  # 29 rows: no world size divides them, so the shards are uneven
CONTEXT = 64
GLOBAL_BATCH = 16

_SUBJECTS = ("the limpet", "the kelp", "a barnacle", "the mussel", "an old anchor")
_VERBS = ("grips", "holds", "clings to", "never leaves")
_PLACES = ("the rock", "the reef", "the harbour wall", "the keel")


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Speller(nn.Module):
    """A character-level causal language model.

    ``tokens_seen`` is a buffer that training advances: state that is not sharded, and that a checkpoint must
    bring back all the same.
    """

    tokens_seen: Tensor

    def __init__(self, width: int = 128, heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.register_buffer("tokens_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.characters(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_slice(step: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of one rank: its share of the global batch of ``step``."""
    rng = random.Random(step)
    text = [_text(rng, CONTEXT + 1) for _ in range(GLOBAL_BATCH)]
    tokens = torch.tensor([[ALPHABET.index(character) for character in line] for line in text])
    mine = tokens.chunk(world_size)[rank]
    return mine[:, :-1], mine[:, 1:]


def _text(rng: random.Random, length: int) -> str:
    text = ""
    while len(text) < length:
        text += f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_PLACES)}.\n"
    return text[:length]
