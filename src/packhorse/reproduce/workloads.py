"""The two nets over whose size Chen et al. 2016 (arXiv:1604.06174, section 5) measure memory: a deep residual net and an unrolled LSTM.

B batch, T time steps, D inputs of a step, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.models.resnet import equal_stages

Batch = dict[str, Tensor]


class StepwiseLSTM(nn.Module):
    """x (T, B, D) float, labels (T, B) int64 in [0, C)  ->  cross entropy in nats, its mean over B and T, a scalar.

    `layers` LSTM cells a time step and a softmax of its own for each, whose losses are added up as time goes: a chain over time. States start from
    zero.
    """

    def __init__(self, *, inputs: int, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTMCell(width if layer else inputs, width) for layer in range(layers))
        self.head = nn.Linear(width, classes)
        self.width = width

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        zeros = torch.zeros(x.shape[1], self.width, dtype=x.dtype, device=x.device)
        states = [(zeros, zeros)] * len(self.cells)
        loss = torch.zeros((), dtype=x.dtype, device=x.device)
        for step, label in zip(x, labels):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(step, states[layer])
                step = states[layer][0]
            loss = loss + F.cross_entropy(self.head(step), label)
        return loss / x.shape[0]


@dataclass(frozen=True)
class Workload:
    """A net that grows. size: of `sizes`, what the axis of the figure says. make(size): the net and its batch, on the current default device."""

    name: str
    title: str
    axis: str
    sizes: tuple[int, ...]
    make: Callable[[int], tuple[nn.Module, Batch]]


def _residual(depth: int, width: int, batch: int, side: int, classes: int) -> tuple[nn.Module, Batch]:
    model = equal_stages(depth, width=width, classes=classes)
    return model, {"images": torch.randn(batch, 3, side, side), "labels": torch.randint(0, classes, (batch,))}


def _recurrent(length: int, width: int, batch: int, inputs: int, classes: int) -> tuple[nn.Module, Batch]:
    model = StepwiseLSTM(inputs=inputs, width=width, layers=4, classes=classes)
    return model, {"x": torch.randn(length, batch, inputs), "labels": torch.randint(0, classes, (length, batch))}


def resnet_of(sizes: tuple[int, ...]) -> Workload:
    """Batch 32 of 3 x 224 x 224, one layer = convolution, batch norm, relu; four stages of equal length (section 5.2)."""
    title = "ResNet, batch 32 of 3 x 224 x 224, layers of convolution, batch norm and relu in four equal stages"
    return Workload("resnet", title, "layers", sizes, lambda depth: _residual(depth, 64, 32, 224, 1000))


def lstm_of(sizes: tuple[int, ...]) -> Workload:
    """Four layers of 1,024, batch 64, 50 inputs and 5,000 classes at each time step (section 5.3)."""
    title = "LSTM, four layers of 1,024, batch 64, 50 inputs and a softmax over 5,000 classes at each time step"
    return Workload("lstm", title, "time steps", sizes, lambda length: _recurrent(length, 1024, 64, 50, 5000))


def small_resnet(depth: int) -> Workload:
    """The same net at a size that runs here."""
    return Workload("resnet", "ResNet, batch 8 of 3 x 32 x 32, 16 channels at first", "layers", (depth,), lambda n: _residual(n, 16, 8, 32, 10))


def small_lstm(length: int) -> Workload:
    """The same net at a size that runs here."""
    return Workload("lstm", "LSTM, four layers of 64, batch 16", "time steps", (length,), lambda n: _recurrent(n, 64, 16, 50, 100))
