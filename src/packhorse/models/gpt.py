"""A GPT to read in one sitting: pre-layer-norm blocks, learned positions, input and output embedding tied.

B batch, T tokens (seq_len), D width, H heads, V vocabulary, L layers (blocks).
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.models.sizes import Size

INIT_STD = 0.02


class Attention(nn.Module):
    """Self-attention: x (B, T, D) -> (B, T, D), with D/H channels a head. causal: no token sees a later one."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (part.view(B, T, self.heads, D // self.heads).transpose(1, 2) for part in self.qkv(x).split(D, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(B, T, D))


class FeedForward(nn.Module):
    """x (B, T, D) -> (B, T, D) through 4 D hidden channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x (B, T, D) -> (B, T, D): attention and feed-forward, each added to the stream that it read."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))


class GPT(nn.Module):
    """ids (B, T), labels (B, T), int64 in [0, V)  ->  mean cross entropy in nats a token, a scalar.

    Weights start from N(0, 0.02), biases from 0; the layers that write into the stream start 1/sqrt(2 L) smaller, so that the
    stream keeps its scale over 2 L additions (Shoeybi et al. 2019, arXiv:1909.08053, section 4.2). Draws come from torch's
    ordinary generator, in module order.
    """

    tensor_plan: ClassVar = {
        "tokens": "vocab",
        "blocks.*.attention.qkv": ("column", 3),
        "blocks.*.attention.out": "row",
        "blocks.*.feed_forward.up": "column",
        "blocks.*.feed_forward.out": "row",
    }

    def __init__(self, *, vocab: int, layers: int, width: int, heads: int, seq_len: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq_len, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD / (math.sqrt(2 * layers) if name.endswith(".out.weight") else 1))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.dropout(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(size: Size, *, dropout: float = 0.0) -> GPT:
    """The GPT of a published size (packhorse.models.sizes)."""
    return GPT(vocab=size.vocab, layers=size.layers, width=size.width, heads=size.heads, seq_len=size.seq_len, dropout=dropout)
