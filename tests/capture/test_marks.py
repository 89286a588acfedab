"""packhorse.keep and packhorse.drop: nothing in eager PyTorch, a mark on the right node in a capture."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import packhorse as ph
from against_plain import assert_steps_equal
from packhorse.capture.capture import capture, capture_evaluation

pytestmark = pytest.mark.cpu


class Model(nn.Module):
    """loss = sum of forward(model, x)."""

    def __init__(self, forward):
        super().__init__()
        self.fc, self.out, self.conv, self.step = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(1, 2, 3), forward

    def forward(self, x):
        return self.step(self, x).sum()


def marks(forward, x=None, graph="micro", **options):
    captured = capture(Model(forward), {"x": torch.ones(2, 4) if x is None else x}, None, **options)
    return [(node.op, node.mark, node.mark_name, node.phase) for node in getattr(captured, graph).nodes if node.mark]


def test_in_eager_pytorch_a_mark_is_its_argument():
    x = torch.randn(3, requires_grad=True)
    assert ph.keep(x, "x") is x and ph.drop(x) is x and ph.keep(x=x, name="x") is x
    with torch.device("meta"):  # another TorchFunctionMode
        assert ph.keep(x, "x") is x and ph.drop(x) is x
    with pytest.raises(ph.UserError, match="seen tuple"):
        ph.drop((x,))
    with pytest.raises(ph.UserError, match="name is a NoneType"):
        ph.keep(x, None)


@pytest.mark.parametrize(
    ("forward", "wanted"),
    [
        (lambda m, x: m.out(ph.keep(m.fc(x), "hidden")), [("aten.addmm.default", "keep", "hidden")]),
        (lambda m, x: m.out(ph.drop(m.fc(x).tanh())), [("aten.tanh.default", "drop", "")]),
        # a view: what made the storage
        (lambda m, x: ph.keep(m.fc(x).tanh().view(-1)[2:5], "part") ** 2, [("aten.tanh.default", "keep", "part")]),
        # one result of several, copies that vanish, a name given again
        (lambda m, x: ph.drop(F.layer_norm(m.fc(x), [4])).tanh(), [("aten.native_layer_norm.default", "drop", "")]),
        (lambda m, x: ph.keep(F.dropout(m.fc(x).exp(), 0.0), "same").tanh(), [("aten.exp.default", "keep", "same")]),
        (lambda m, x: ph.keep(ph.keep(m.fc(x).exp(), "a").view(-1), "b").tanh(), [("aten.exp.default", "keep", "b")]),
        # the value at the time of the mark, before it is changed in place
        (lambda m, x: ph.drop(m.fc(x)).add_(1).tanh(), [("aten.addmm.default", "drop", "")]),
    ],
)
def test_a_mark_is_on_the_operator_that_made_the_value(forward, wanted):
    for graph in ("micro", "first", "next"):
        assert marks(forward, graph=graph, num_micro_batches=2) == [(*mark, "forward") for mark in wanted]


@pytest.mark.parametrize("side", [9, 3])  # 3: the plain kernel
def test_a_mark_on_a_convolution(side):
    found = marks(lambda m, x: ph.keep(m.conv(x), "conv").relu(), torch.ones(2, 1, side, side))
    assert [mark[1:] for mark in found] == [("keep", "conv", "forward")] and "conv" in found[0][0]


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.fc, self.index = nn.Linear(4, 4), index

    def forward(self, x, state):
        hidden = ph.keep(self.fc(x).tanh(), f"block {self.index}")
        return {"x": x + ph.drop(hidden.exp()), "state": (state, hidden)}


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(k) for k in range(3))

    def forward(self, x):
        state = x
        for block in self.blocks:
            found = block(x, state)
            x, state = found["x"], found["state"][1]
        return (x * state).sum()


def test_marks_in_nested_modules_change_no_bit():
    torch.manual_seed(0)
    model, batch = Deep(), {"x": torch.randn(3, 4)}
    nodes = capture(model, batch, None).micro.nodes
    assert [(n.op, n.mark_name, n.module) for n in nodes if n.mark == "keep"] == [
        ("aten.tanh.default", f"block {k}", f"blocks.{k}") for k in range(3)
    ]
    assert [(n.op, n.module) for n in nodes if n.mark == "drop"] == [("aten.exp.default", f"blocks.{k}") for k in range(3)]
    unmarked = [n.op for n in capture(Unmarked(copy.deepcopy(model)), batch, None).micro.nodes]
    assert [n.op for n in nodes] == unmarked
    assert_steps_equal(model, batch)


class Unmarked(nn.Module):
    """The same without marks."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        state = x
        for block in self.model.blocks:
            hidden = block.fc(x).tanh()
            x, state = x + hidden.exp(), hidden
        return (x * state).sum()


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (lambda m, x: F.linear(x, ph.keep(m.fc.weight, "w")), "keep in module '.*' at test_marks.py:.* marks param 'fc.weight' itself"),
        (lambda m, x: x @ ph.keep(m.fc.weight.t(), "w"), "marks param 'fc.weight' itself, or a view"),
        (lambda m, x: m.fc(ph.drop(x)), "drop in module .* marks batch 'x' itself"),
        (lambda m, x: ph.drop(ph.keep(m.fc(x), "a").view(-1)), "drop in .*packhorse.keep already: results of aten.addmm.default, in module 'fc'"),
        (lambda m, x: (m.fc(x), ph.keep(m.out(x), "unused"))[0], "nothing that the loss depends on uses .* at test_marks.py:"),
    ],
)
def test_marks_that_decide_nothing_are_refused_with_their_line(forward, text):
    with pytest.raises(ph.CaptureError, match=text):
        marks(forward)
    # an evaluation keeps nothing anyway
    graph = capture_evaluation(Model(forward), {"x": torch.ones(2, 4)}, None)[0]
    assert not any(node.mark for node in graph.nodes)
