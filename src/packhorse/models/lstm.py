"""A language model of stacked LSTM or GRU layers, the recurrence written out or left to nn.LSTM.

B batch, T tokens, D width, V vocabulary, L layers. Written out, each of the T * L cell calls is in the captured graph by itself, so that a
planner may keep some states and compute the others again; this is the net that Chen et al. 2016 (arXiv:1604.06174, section 5.3) unroll.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Cell = Literal["lstm", "gru"]


class Unrolled(nn.Module):
    """x (B, T, D) -> (B, T, D): L cells a time step, dropout between layers. States start from zero. As nn.LSTM(batch_first=True)."""

    def __init__(self, width: int, layers: int, dropout: float, cell: Cell) -> None:
        super().__init__()
        kind = nn.LSTMCell if cell == "lstm" else nn.GRUCell
        self.cells = nn.ModuleList(kind(width, width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
        states: list = [(zeros, zeros) if isinstance(cell, nn.LSTMCell) else zeros for cell in self.cells]
        outputs = []
        for step in x.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(step if layer == 0 else self.dropout(step), states[layer])
                step = states[layer][0] if isinstance(cell, nn.LSTMCell) else states[layer]
            outputs.append(step)
        return torch.stack(outputs, 1)


class Fused(nn.Module):
    """The same through nn.LSTM or nn.GRU: fewer lines for the reader, one kernel for eager PyTorch, the same operators for a capture."""

    def __init__(self, width: int, layers: int, dropout: float, cell: Cell) -> None:
        super().__init__()
        kind = nn.LSTM if cell == "lstm" else nn.GRU
        self.layers = kind(width, width, layers, dropout=dropout if layers > 1 else 0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class LSTM(nn.Module):
    """ids (B, T), labels (B, T), int64 in [0, V)  ->  mean cross entropy in nats a token, a scalar.

    Input and output embedding are two matrices. Weights start as PyTorch's own modules draw them.
    """

    def __init__(self, *, vocab: int, layers: int, width: int, dropout: float = 0.0, cell: Cell = "lstm", unrolled: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.dropout = nn.Dropout(dropout)
        self.body = (Unrolled if unrolled else Fused)(width, layers, dropout, cell)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.dropout(self.body(self.dropout(self.tokens(ids)))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
