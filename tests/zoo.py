"""Small models that tests train: plain PyTorch, written for their traps, not for their use."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from packhorse.models.gpt import GPT


def gpt(dropout: float = 0.1) -> GPT:
    return GPT(vocab=61, layers=2, width=32, heads=4, seq_len=16, dropout=dropout)


class MLP(nn.Module):
    """Sizes that are no multiple of a vector; dropout; an in-place activation; a frozen and an unused layer; a parameter used twice."""

    def __init__(self, width: int = 37):
        super().__init__()
        self.inner = nn.Linear(13, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.unused = nn.Linear(5, 5)
        self.twice = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.out = nn.Linear(width, 7)

    def forward(self, x, y):
        h = F.relu(self.inner(x), inplace=True)
        h = torch.tanh(self.frozen(h)) * self.scale
        h = F.dropout(self.twice(self.twice(h)), 0.2, self.training)
        h += torch.sigmoid(h)
        return F.cross_entropy(self.out(h), y)


class ConvNet(nn.Module):
    """Convolution, batch norm (statistics move once a step), in-place relu, max and average pooling, a residual."""

    def __init__(self, channels: int = 8):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, 5)

    def forward(self, x, y):
        x = F.max_pool2d(F.relu(self.norm(self.stem(x)), inplace=True), 2)
        x = F.relu(self.norm2(self.conv(x)) + x, inplace=True)
        x = F.avg_pool2d(x, 2)
        return F.cross_entropy(self.fc(F.dropout(x.mean((2, 3)), 0.1, self.training)), y)


class Outputs:
    """An output object with a `.loss`, as Hugging Face models return."""

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


def batch_for(model: nn.Module, seed: int = 0, size: int = 4) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    if isinstance(model, GPT):
        return {"ids": torch.randint(0, 61, (size, 16), generator=g), "labels": torch.randint(0, 61, (size, 16), generator=g)}
    if isinstance(model, MLP):
        return {"x": torch.randn(size, 13, generator=g), "y": torch.randint(0, 7, (size,), generator=g)}
    return {"x": torch.randn(size, 3, 8, 8, generator=g), "y": torch.randint(0, 5, (size,), generator=g)}


MODELS = {"gpt": gpt, "mlp": MLP, "conv": ConvNet}
