# SPDX-License-Identifier: Apache-2.0
"""A small GPT: byte embedding, pre-norm blocks with causal attention, tied output head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class Shape:
    """The size of a `GPT`; `width` is a multiple of `heads`."""

    layers: int
    width: int
    heads: int
    context: int


class Block(nn.Module):
    """Attention and a feed-forward network, each normalised before and added to its input."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.merge = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    """Predicts each next byte of a text."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # The sum over the blocks keeps its variance whatever their number.
                depth = 2 * shape.layers if name.endswith(("merge.weight", "narrow.weight")) else 1
                nn.init.normal_(parameter, std=0.02 / depth**0.5)

    def forward(self, text: Tensor) -> Tensor:
        """Maps bytes (batch, time), int64, to logits (batch, time, 256)."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.tokens(text) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
