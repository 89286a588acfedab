"""The nets whose steps `packhorse calibrate` times: together they call the operators that models of text and images are made of, in several sizes.

The language models and the residual nets are those of packhorse.models; some of them recompute, for the operators that stand in mirrors only.
The rest goes through lists of functions, a size at a time.
N rows, D columns, B batch, C channels, V vocabulary, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.models.lstm import LSTM
from packhorse.models.resnet import ResNet, resnet

SGD, Momentum, RMSprop, AdamW = (
    lambda p: torch.optim.SGD(p, lr=1e-4),
    lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
    lambda p: torch.optim.RMSprop(p, lr=1e-6),
    lambda p: torch.optim.AdamW(p, lr=1e-6),
)


@dataclass(frozen=True)
class Net:
    """A model in the making, with its batch and optimizer."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    optimizer: Callable[[Any], torch.optim.Optimizer] = AdamW
    precision: str = "fp32"
    recompute: str = "none"


class Elementwise(nn.Module):
    """Every function of one or two tensors (N, D); the gradient of each comes with it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.x, self.y = (nn.Parameter(torch.rand(rows, columns) + 0.1) for _ in range(2))
        self.bias = nn.Parameter(torch.rand(columns))

    def forward(self, shift: Tensor) -> Tensor:
        x, y = self.x + shift, self.y * shift
        total = x + self.bias
        for function in (
            F.relu, F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus, F.elu, F.leaky_relu, F.hardtanh, F.mish, F.hardswish,
            torch.exp, torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.neg, torch.abs, torch.sin, torch.cos, torch.square, torch.log1p,
            lambda t: F.gelu(t, approximate="tanh"), lambda t: t**3, lambda t: t * 1.5, lambda t: t - 1.5, lambda t: 1 / t, lambda t: t.clamp(0, 0.8),
            lambda t: F.dropout(t, 0.1), lambda t: torch.where(t > 0.5, t, y), lambda t: t.masked_fill(t > 0.5, 0.0), lambda t: t * y,
            lambda t: t / y, lambda t: t - y, lambda t: torch.maximum(t, y), lambda t: t * self.bias, lambda t: t.to(torch.float64).to(torch.float32),
        ):  # fmt: skip
            total = total + function(x)
        return total.mean()


class Rows(nn.Module):
    """Norms, sums, softmaxes and every way of moving rows and columns (B, N, D) about."""

    def __init__(self, batch: int, rows: int, columns: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.rand(batch, rows, columns) + 0.1)
        self.norm, self.group = nn.LayerNorm(columns), nn.GroupNorm(4, rows)
        self.table = nn.Embedding(1000, columns)
        self.scores = nn.Linear(columns, 100)

    def forward(self, ids: Tensor) -> Tensor:
        x, half = self.x + 1.0, self.x.shape[2] // 2
        total = self.norm(x) + self.group(x) + self.table(ids) + x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        total = total + torch.softmax(x, -1) + torch.log_softmax(x, -1) + x.cumsum(1) + x.sum(1, keepdim=True) + x.mean(-1, keepdim=True)
        total = total + x.amax(-1, keepdim=True) + x.std(1, keepdim=True) + torch.logsumexp(x, -1, keepdim=True) + x.max(1, keepdim=True)[0]
        total = total + torch.cat([-x[..., half:], x[..., :half]], -1) + torch.stack([x[..., ::2], x[..., 1::2]], -1).flatten(-2)
        total = total + x.transpose(0, 1).contiguous().transpose(0, 1) + x.transpose(1, 2).contiguous().transpose(1, 2)
        total = total + F.pad(x[:, 1:], (0, 0, 1, 0)) + x[:, 3:4] + x[:, -1].unsqueeze(1) + x.roll(1, 1) + x.flip(1) + x.tril() + x.triu()
        total = total + x[:, ids[0]] + x.index_select(1, ids[0]) + x.gather(1, ids.unsqueeze(-1).expand_as(x)) + x.repeat(1, 1, 2)[..., : -half * 2]
        picked = F.cross_entropy(self.scores(total).flatten(0, 1), ids.flatten() % 100)
        return picked + F.mse_loss(total, x.detach()) + total.sum()


class Images(nn.Module):
    """Convolutions of every kind, norms and poolings of images (B, C, side, side)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(channels, channels, 1),
                nn.Conv2d(channels, 2 * channels, 3, padding=1, bias=False),
                nn.Conv2d(channels, channels, 3, stride=2, padding=1),
                nn.Conv2d(channels, channels, 5, padding=2),
                nn.Conv2d(channels, channels, 3, padding=1, groups=channels),
                nn.Conv2d(channels, channels, 3, padding=1, groups=2),
                nn.ConvTranspose2d(channels, channels, 2, stride=2),
            ]
        )
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.poolings = (
            lambda x: F.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 2), lambda x: F.adaptive_avg_pool2d(x, 1),
            lambda x: F.adaptive_avg_pool2d(x, 4), lambda x: F.interpolate(x, scale_factor=2.0), lambda x: x.mean((2, 3)),
            lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), F.relu6, lambda x: F.dropout2d(x, 0.1),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(images)))
        return torch.stack([F.relu(layer(x)).mean() for layer in self.layers] + [pool(x).mean() for pool in self.poolings]).sum()


class Attention(nn.Module):
    """Attention in the forms that a capture knows: causal and not, with a mask, with dropout. (B, heads, T, D)."""

    def __init__(self, batch: int, heads: int, tokens: int, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(batch, heads, tokens, width)) for _ in range(3))

    def forward(self, mask: Tensor) -> Tensor:
        q, k, v = self.q * 1.0, self.k * 1.0, self.v * 1.0
        total = F.scaled_dot_product_attention(q, k, v, is_causal=True) + F.scaled_dot_product_attention(q, k, v)
        total = total + F.scaled_dot_product_attention(q, k, v, attn_mask=mask) + F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return total.mean()


def tokens(vocab: int, batch: int, length: int) -> dict[str, Tensor]:
    """ids and labels (B, T)."""
    ids = torch.randint(0, vocab, (batch, length + 1))
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def images(batch: int, side: int, classes: int) -> dict[str, Tensor]:
    """images (B, 3, side, side), labels (B,)."""
    return {"images": torch.randn(batch, 3, side, side), "labels": torch.randint(0, classes, (batch,))}


def _elementwise(rows: int, columns: int, optimizer) -> Net:
    return Net(f"elementwise {rows} x {columns}", lambda: Elementwise(rows, columns), lambda: {"shift": torch.ones(columns)}, optimizer)


def _rows(batch: int, rows: int, columns: int) -> Net:
    return Net(
        f"rows {batch} x {rows} x {columns}",
        lambda: Rows(batch, rows, columns),
        lambda: {"ids": torch.randint(0, rows, (batch, rows))},
        Momentum,
    )


def _images(batch: int, channels: int, side: int) -> Net:
    return Net(f"images {batch} x {channels} x {side}", lambda: Images(channels), lambda: {"images": torch.randn(batch, 3, side, side)})


def _attention(batch: int, heads: int, length: int, width: int) -> Net:
    return Net(
        f"attention {batch} x {heads} x {length} x {width}",
        lambda: Attention(batch, heads, length, width),
        lambda: {"mask": torch.ones(length, length, dtype=torch.bool).tril()},
        Momentum,
    )


def _gpt(layers: int, width: int, batch: int, length: int, vocab: int, dropout: float, precision: str = "fp32") -> Net:
    return Net(
        f"GPT {layers} x {width}, {batch} x {length} {precision}",
        lambda: GPT(vocab=vocab, layers=layers, width=width, heads=width // 64, seq_len=length, dropout=dropout),
        lambda: tokens(vocab, batch, length),
        precision=precision,
        recompute="sqrt",
    )


def _lstm(width: int, batch: int, length: int, cell: str = "lstm", precision: str = "fp32") -> Net:
    return Net(
        f"{cell} {width}, {batch} x {length} {precision}",
        lambda: LSTM(vocab=1000, layers=2, width=width, dropout=0.1, cell=cell),  # type: ignore[arg-type]
        lambda: tokens(1000, batch, length),
        precision=precision,
    )


def _cifar(depth: int, width: int, batch: int, side: int, bottleneck: bool = False, precision: str = "fp32") -> Net:
    return Net(
        f"ResNet-{depth} of width {width}, {batch} x 3 x {side} x {side} {precision}",
        lambda: resnet(depth, width=width, bottleneck=bottleneck),
        lambda: images(batch, side, 10),
        Momentum,
        precision,
        "sqrt",
    )


NETS = (
    _elementwise(32, 64, RMSprop),
    _elementwise(128, 512, SGD),
    _elementwise(512, 1024, SGD),
    _elementwise(2048, 1024, SGD),
    _rows(2, 16, 64),
    _rows(4, 128, 192),
    _rows(8, 256, 512),
    _images(4, 8, 12),
    _images(8, 16, 32),
    _images(12, 32, 32),
    _images(4, 64, 40),
    _attention(1, 2, 32, 16),
    _attention(2, 4, 128, 64),
    _attention(2, 6, 384, 64),
    _gpt(1, 64, 4, 32, 300, 0.1),
    _gpt(1, 128, 8, 64, 1000, 0.0),
    _gpt(1, 384, 8, 128, 3000, 0.1),
    _gpt(1, 640, 1, 192, 2000, 0.0),
    _gpt(1, 128, 4, 64, 500, 0.1, "bf16"),
    _gpt(1, 384, 4, 128, 1000, 0.1, "bf16"),
    Net("BERT 1 x 320", lambda: BERT(vocab=2000, layers=1, width=320, heads=5, seq_len=96), lambda: tokens(2000, 6, 96)),
    _lstm(64, 8, 4),
    _lstm(128, 64, 2, "gru"),
    _lstm(320, 16, 4),
    _lstm(512, 64, 2),
    _lstm(128, 16, 2, precision="bf16"),
    _lstm(320, 48, 2, precision="bf16"),
    _cifar(8, 16, 8, 32),
    _cifar(8, 24, 64, 24),
    _cifar(11, 24, 16, 24, bottleneck=True),
    _cifar(8, 16, 8, 24, precision="bf16"),
    _cifar(8, 24, 32, 24, precision="bf16"),
    Net(
        "ResNet of ImageNet's form",
        lambda: ResNet((1, 1, 1, 1), width=48, classes=100, bottleneck=False, large=True),
        lambda: images(4, 96, 100),
    ),
)

CHECKS = (
    Net(
        "GPT, 4 layers, width 256, 4 x 256 tokens",
        lambda: GPT(vocab=4096, layers=4, width=256, heads=4, seq_len=256, dropout=0.1),
        lambda: tokens(4096, 4, 256),
    ),
    Net("ResNet-20, 32 x 3 x 32 x 32", lambda: resnet(20), lambda: images(32, 32, 10)),
    Net(
        "LSTM, 2 layers, width 256, 32 x 12 tokens",
        lambda: LSTM(vocab=2000, layers=2, width=256, dropout=0.1),
        lambda: tokens(2000, 32, 12),
    ),
)
