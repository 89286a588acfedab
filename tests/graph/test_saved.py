"""What each operator keeps for its backward pass, in bytes an element of its input, against the least that its formula needs.

The least by hand: tanh' = 1 - y^2, sigmoid' = y(1 - y), relu' = [y > 0], exp' = y, sqrt' = 1/(2y), softmax: from the output alone (4 bytes);
sums, means, negation, products with a number: nothing; dropout: which elements were dropped, one byte; max pooling: the index of each
of a quarter as many outputs, 8 bytes / 4; average pooling and upsampling: nothing; gelu, silu: the input.
"""

import pytest
import torch
import torch.nn.functional as F

from packhorse.capture.capture import capture
from packhorse.graph.saved import saved_by_operator, saved_storages

pytestmark = pytest.mark.cpu

SHAPE = (4, 8, 8, 8)
LEAST = {
    "tanh": (torch.tanh, 4),
    "sigmoid": (torch.sigmoid, 4),
    "relu": (F.relu, 4),
    "exp": (torch.exp, 4),
    "sqrt": (lambda h: torch.sqrt(h), 4),
    "softmax": (lambda h: h.softmax(-1), 4),
    "add": (lambda h: h + h, 0),
    "negation": (lambda h: -h, 0),
    "product with a number": (lambda h: h * 3.0, 0),
    "mean": (lambda h: h.mean((2, 3)), 0),
    "concatenation": (lambda h: torch.cat([h, h]), 0),
    "dropout": (lambda h: F.dropout(h, 0.3), 1),
    "max pooling": (lambda h: F.max_pool2d(h, 2), 2),
    "average pooling": (lambda h: F.avg_pool2d(h, 2), 0),
    "adaptive average pooling": (lambda h: F.adaptive_avg_pool2d(h, 2), 0),
    "gelu": (F.gelu, 4),
    "silu": (F.silu, 4),
}


class Net(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(SHAPE))
        self.function = function

    def forward(self, x):
        return self.function(x * self.w).sum()


@pytest.mark.parametrize("name", LEAST)
def test_nothing_is_kept_beyond_the_least(name):
    function, least = LEAST[name]
    x = torch.rand(SHAPE)
    saved = saved_storages(capture(Net(function).train(), (x,), None).micro)
    saved.pop("batch.0")  # d(x * w)/dw needs x: the batch's own
    assert sum(saved.values()) == least * x.numel()


def test_relu_after_dropout_keeps_output_and_one_byte():
    x = torch.rand(SHAPE)
    graph = capture(Net(lambda h: F.relu(F.dropout(h, 0.3))).train(), (x,), None).micro
    assert saved_by_operator(graph) == {"aten.native_dropout.default": x.numel(), "aten.relu.default": 4 * x.numel()}
