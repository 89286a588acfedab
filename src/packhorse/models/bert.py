"""BERT to read in one sitting: an encoder that sees both sides, and predicts the tokens that were hidden from it (masked LM).

B batch, T tokens, D width, H heads, V vocabulary, L layers (blocks).
Source: Devlin et al. 2019, arXiv:1810.04805. Without its second task (next sentence), which later work found of no use, and so without its pooler.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.models.gpt import Attention
from packhorse.models.sizes import Size

INIT_STD = 0.02
NORM_EPS = 1e-12
SEGMENTS = 2
IGNORED = -100  # a label that takes no part in the loss


class Block(nn.Module):
    """x (B, T, D) -> (B, T, D).

    pre_norm False: norm(x + f(x)), as published; True: x + f(norm(x)), which leaves the stream clean and lets deep models train
    (Shoeybi et al. 2019, arXiv:1909.08053, figure 7: (a) and (b)).
    """

    def __init__(self, width: int, heads: int, dropout: float, pre_norm: bool) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = Attention(width, heads, dropout, causal=False)
        self.norm_attention = nn.LayerNorm(width, eps=NORM_EPS)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm_feed_forward = nn.LayerNorm(width, eps=NORM_EPS)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.dropout(self.attention(self.norm_attention(x)))
            return x + self.dropout(self.feed_forward(self.norm_feed_forward(x)))
        x = self.norm_attention(x + self.dropout(self.attention(x)))
        return self.norm_feed_forward(x + self.dropout(self.feed_forward(x)))


class BERT(nn.Module):
    """ids (B, T), labels (B, T), int64  ->  mean cross entropy in nats over the labels that are not -100, a scalar.

    segments (B, T) in {0, 1}: which of two texts a token belongs to; one text where it is not given. Input and output embedding are tied.
    With pre_norm the norm of the embeddings moves behind the last block. Weights start from N(0, 0.02), biases from 0.
    """

    tensor_plan: ClassVar = {
        "tokens": "vocab",
        "head": "vocab",
        "blocks.*.attention.qkv": ("column", 3),
        "blocks.*.attention.out": "row",
        "blocks.*.feed_forward.0": "column",
        "blocks.*.feed_forward.2": "row",
    }

    def __init__(self, *, vocab: int, layers: int, width: int, heads: int, seq_len: int = 512, dropout: float = 0.1, pre_norm: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq_len, width)
        self.segments = nn.Embedding(SEGMENTS, width)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.pre_norm = pre_norm
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout, pre_norm) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=NORM_EPS))
        self.head = nn.Linear(width, vocab)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, ids: Tensor, labels: Tensor, segments: Tensor | None = None) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(places) + self.segments(torch.zeros_like(ids) if segments is None else segments)
        x = self.dropout(x if self.pre_norm else self.norm(x))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.transform(self.norm(x) if self.pre_norm else x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def bert(size: Size, *, dropout: float = 0.1) -> BERT:
    """The BERT of a published size (packhorse.models.sizes)."""
    return BERT(
        vocab=size.vocab,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        seq_len=size.seq_len,
        dropout=dropout,
        pre_norm=size.pre_norm,
    )
