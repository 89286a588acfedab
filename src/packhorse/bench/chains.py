"""Models of `packhorse bench frontier`: a first part, a sequence of blocks and a last part, which every rival can walk through in its own way.

B batch, T tokens, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.models.gpt import GPT, Block
from packhorse.models.resnet import equal_stages


class Chain(nn.Module):
    """first(inputs, labels) -> what the first block takes; each block takes what the one before gives; last(that, labels) -> loss, a scalar."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.Sequential(*blocks), last

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(inputs, labels)), labels)


class SwiGLU(nn.Module):
    """x (B, T, D) -> (B, T, D) through `hidden` gated channels (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.gate(x)) * self.up(x))


class _Embed(nn.Module):
    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.tokens, self.positions, self.dropout = gpt.tokens, gpt.positions, gpt.dropout

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))


class _Predict(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def transformer(*, layers: int, width: int = 64, heads: int = 4, hidden: int = 192, vocab: int = 512, seq_len: int = 128) -> Chain:
    """Pre-norm blocks with RMSNorm and SwiGLU, learned positions, input and output embedding tied; no dropout."""
    gpt = GPT(vocab=vocab, layers=layers, width=width, heads=heads, seq_len=seq_len)
    for block in gpt.blocks:
        assert isinstance(block, Block)
        block.norm_attention, block.norm_feed_forward = nn.RMSNorm(width), nn.RMSNorm(width)  # type: ignore[assignment]
        block.feed_forward = SwiGLU(width, hidden)  # type: ignore[assignment]
    return Chain(_Embed(gpt), list(gpt.blocks), _Predict(nn.RMSNorm(width), gpt.head))


def gpt_chain(*, layers: int, width: int = 64, heads: int = 4, vocab: int = 512, seq_len: int = 128) -> Chain:
    """packhorse.models.gpt.GPT, cut at its blocks; no dropout."""
    gpt = GPT(vocab=vocab, layers=layers, width=width, heads=heads, seq_len=seq_len)
    return Chain(_Embed(gpt), list(gpt.blocks), _Predict(gpt.norm, gpt.head))


class _Stem(nn.Module):
    def __init__(self, stem: nn.Module) -> None:
        super().__init__()
        self.stem = stem

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return self.stem(images)


class _Classify(nn.Module):
    def __init__(self, norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, head

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(F.relu(self.norm(x), inplace=True).mean((2, 3))), labels)


def resnet_chain(*, depth: int, width: int = 8) -> Chain:
    """The conv-bn-relu net of Chen et al. 2016, section 5.2, cut at its residual blocks (two layers each)."""
    net = equal_stages(depth, classes=10, width=width)
    return Chain(_Stem(net.stem), list(net.blocks), _Classify(net.norm, net.head))


class _Start(nn.Module):
    """ids (B, T) -> what goes from one time step to the next: embedded tokens (B, T, D), labels (B, T), the loss so far, and h, c of each cell."""

    def __init__(self, vocab: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens, self.layers = nn.Embedding(vocab, width), layers

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        x = self.tokens(ids)
        zero = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
        return (x, labels, zero.sum(), *[zero] * (2 * self.layers))


class _TimeStep(nn.Module):
    """Time step `place` of cells that all steps share; its loss is added to the loss so far."""

    def __init__(self, cells: nn.ModuleList, head: nn.Module, place: int) -> None:
        super().__init__()
        self.cells, self.head, self.place = cells, head, place

    def forward(self, carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens, labels, loss, *states = carried
        x = tokens[:, self.place]
        for layer, cell in enumerate(self.cells):
            states[2 * layer : 2 * layer + 2] = cell(x, (states[2 * layer], states[2 * layer + 1]))
            x = states[2 * layer]
        return (tokens, labels, loss + F.cross_entropy(self.head(x), labels[:, self.place]), *states)


class _Mean(nn.Module):
    def forward(self, carried: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        return carried[2] / labels.shape[1]


def lstm_chain(*, steps: int, width: int = 64, layers: int = 4, vocab: int = 500) -> Chain:
    """Stacked LSTM cells with a softmax at each time step (Chen et al. 2016, section 5.3); a block is one time step."""
    cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
    head = nn.Linear(width, vocab)
    return Chain(_Start(vocab, width, layers), [_TimeStep(cells, head, place) for place in range(steps)], _Mean())


def _ids(vocab: int, batch: int, length: int) -> dict[str, Tensor]:
    return {"inputs": torch.randint(0, vocab, (batch, length)), "labels": torch.randint(0, vocab, (batch, length))}


@dataclass(frozen=True)
class Workload:
    """A chain and its batch, as keyword arguments. title: for the head of the table."""

    title: str
    make: Callable[[], Chain]
    batch: Callable[[], dict[str, Any]]


WORKLOADS = {
    "transformer-24": Workload(
        "transformer, 24 blocks, width 64, 4 heads, SwiGLU 192, RMSNorm, 2 x 128 tokens, vocabulary 512",
        lambda: transformer(layers=24),
        lambda: _ids(512, 2, 128),
    ),
    "gpt-24": Workload("GPT, 24 blocks, width 64, 4 heads, 2 x 128 tokens, vocabulary 512", lambda: gpt_chain(layers=24), lambda: _ids(512, 2, 128)),
    "gpt-12": Workload("GPT, 12 blocks, width 128, 4 heads, 4 x 128 tokens, vocabulary 512", lambda: gpt_chain(layers=12, width=128),
                       lambda: _ids(512, 4, 128)),
    "resnet-128": Workload(
        "conv-bn-relu net of 128 layers, 8 channels at first, 4 x 3 x 64 x 64",
        lambda: resnet_chain(depth=128),
        lambda: {"inputs": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 10, (4,))},
    ),
    "lstm-64": Workload("4 LSTM cells, width 64, 64 time steps, batch 16, 500 classes", lambda: lstm_chain(steps=64), lambda: _ids(500, 16, 64)),
    "tiny": Workload(
        "transformer, 4 blocks, width 16, for a quick look", lambda: transformer(layers=4, width=16, heads=2, hidden=32, vocab=32, seq_len=16),
        lambda: _ids(32, 2, 16),
    ),
}  # fmt: skip
