"""The language model: a decoder-only transformer over bytes, in the manner of GPT-2.

Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256
"""The vocabulary: every value of a byte. UTF-8 text needs no other tokens."""
_INIT = 0.02


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    width: int
    """Length of the vector that stands for a byte."""
    depth: int
    """Blocks of attention and MLP."""
    heads: int
    """Attention heads of a block; the width must be a multiple of it."""
    window: int
    """Bytes that the model can look back on, the current one included."""


class Transformer(nn.Module):
    """Bytes in, logits of the byte that follows each of them out.

    1. Add the embedding of each byte to the embedding of its position.
    2. Apply the blocks.
    3. Normalise, and compare with the embedding of every byte: input and output share one matrix.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.bytes = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.window, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width)
        self.apply(_init)
        # Each block adds to the stream twice. Smaller weights keep its variance at any depth.
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, std=_INIT / math.sqrt(2 * shape.depth))

    def forward(self, text: Tensor) -> Tensor:
        """
        Args:
            text: (batch, length) integers from 0 to 255; at most `window` of them in a row.

        Returns:
            Logits (batch, length, 256).
        """
        text = text.long()
        places = torch.arange(text.size(1), device=text.device)
        x = self.bytes(text) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.bytes.weight)


class Block(nn.Module):
    """Attention, then an MLP. Each reads the normalised stream and adds to the stream itself."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        added: Tensor = self.mlp(self.mlp_norm(x))
        return x + added


class Attention(nn.Module):
    """Causal self-attention: each byte looks at itself and those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, length, 3 * width) -> 3 x (batch, heads, length, width / heads)
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return attended


class MLP(nn.Module):
    """One hidden layer, four times as wide, with GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(F.gelu(self.hidden(x), approximate="tanh"))
        return made


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INIT)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


@torch.no_grad()
def generate(
    model: nn.Module, prompt: Tensor, length: int, window: int, seed: int, temperature: float = 0.8
) -> bytes:
    """Continue a prompt. The result depends on the arguments alone.

    Args:
        prompt: bytes to begin with, at least one, as a tensor on the model's device.
        length: how many bytes to add.
        window: how many bytes the model can look back on.
        temperature: below 1, likely bytes become more likely.
    """
    random = torch.Generator().manual_seed(seed)
    text = prompt.long()
    for _ in range(length):
        logits = model(text[None, -window:])[0, -1].float()
        chances = (logits / temperature).softmax(0).cpu()
        text = torch.cat([text, chances.multinomial(1, generator=random).to(text.device)])
    return bytes(text[len(prompt) :].tolist())
