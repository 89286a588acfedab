"""Stamped captures are what a whole capture would have been, or there is none."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import packhorse as ph
from packhorse.capture import stamp as stamping
from packhorse.capture.calls import contents
from packhorse.capture.capture import capture
from packhorse.capture.stamp import captured_whole
from packhorse.graph.text import print_graph
from packhorse.graph.verify import verify
from packhorse.models.gpt import GPT

pytestmark = pytest.mark.cpu

WIDTH, DEPTH = 6, 16

stamped = partial(stamping.stamped, most_captured=0.8)  # nets deep enough for it to be worth while take long to capture whole


class Block(nn.Module):
    """Batch statistics, dropout, an operation in place, and a constant that forward makes."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.fc, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        return x + F.relu(self.dropout(self.norm(self.fc(x))), inplace=True) * torch.tensor(0.5) * scale


class Net(nn.Module):
    """Blocks in a row; `walk` says how."""

    def __init__(self, walk=None, blocks=DEPTH):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(WIDTH, 1)
        self.walk = walk

    def forward(self, x):
        if self.walk is None:
            for block in self.blocks:
                x = block(x)
        else:
            x = self.walk(self.blocks, x)
        return self.head(x).square().mean()


def x():
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0))


def text(graph):
    """The graph's text with the values of its nodes numbered in order."""
    names = {v.name: f"v{k}" for k, v in enumerate(v for node in graph.nodes for v in node.outputs if v is not None)}
    return re.sub(r"(?<=[%@])[^\s,:()\[\]{}=@+]+", lambda m: names.get(m[0], m[0]), print_graph(graph))


def agrees(model, batch, with_gradients=True, compute=None):
    """Whether the step is stamped, after a look at whether it is the very graph of a whole capture."""
    # on one line, which is the source of what the model's own code does not call
    made, whole = (capturing("micro", model, batch, None, with_gradients, compute) for capturing in (stamped, captured_whole))
    if made is None:
        return False
    verify(made.graph)
    assert text(made.graph) == text(whole.graph)
    assert {k: contents(t) for k, t in made.constants.items()} == {k: contents(t) for k, t in whole.constants.items()}
    return True


def by_index(blocks, x):
    for i in range(len(blocks)):
        x = blocks[i](x)
    return x


def twice(blocks, x):
    for _ in range(2):
        for block in blocks:
            x = block(x)
    return x


def scaled(blocks, x):
    for i, block in enumerate(blocks):
        x = block(x, scale=i + 1)
    return x


def test_blocks():
    assert agrees(Net(scaled).train(), x())


def test_blocks_without_gradients_in_16_bits():
    assert agrees(Net().eval(), x(), with_gradients=False, compute=torch.bfloat16)


def test_two_lists_walked_together_two_at_a_time():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.fcs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * DEPTH))
            self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2 * DEPTH))

        def forward(self, x):
            for i in range(0, len(self.fcs), 2):
                h = F.relu(self.norms[i](self.fcs[i](x)), inplace=True)
                x = F.relu(self.norms[i + 1](self.fcs[i + 1](h)) + x, inplace=True)
            return x.mean()

    assert agrees(Pairs().train(), x())


def test_stages_of_other_kinds_in_one_list():
    class Stages(nn.Module):
        def __init__(self):
            super().__init__()
            first, second = ([nn.Sequential(nn.Linear(w, w), nn.Tanh()) for _ in range(n)] for w, n in ((WIDTH, 24), (4, 20)))
            self.all = nn.Sequential(*first, nn.Linear(WIDTH, 4), *second)

        def forward(self, x):
            return self.all(x).mean()

    assert agrees(Stages(), x())


def test_the_gpt_with_its_tied_weight_and_dropout():
    ids = torch.zeros(2, 10, dtype=torch.int64)
    assert agrees(GPT(vocab=20, layers=12, width=8, heads=2, seq_len=10).train(), {"ids": ids, "labels": ids})


class SumOfLosses(nn.Module):
    """A recurrent net whose steps each add to the loss."""

    def __init__(self, special=None):
        super().__init__()
        self.tokens, self.cell, self.head, self.special = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 9), special

    def forward(self, ids, labels):
        h, loss = torch.zeros(ids.shape[0], WIDTH), 0.0
        for t in range(ids.shape[1]):
            h = F.dropout(torch.tanh(self.cell(h) + self.tokens(ids[:, t])), 0.1)
            loss = loss + F.cross_entropy(self.head(h) * (2.0 if t == self.special else 1.0), labels[:, t])
        return loss / ids.shape[1]


class Cells(nn.Module):
    """Two layers of cells over what is looked up for all steps at once; their outputs are put together again."""

    def __init__(self):
        super().__init__()
        self.tokens, self.cells = nn.Embedding(9, WIDTH), nn.ModuleList(nn.RNNCell(WIDTH, WIDTH) for _ in range(2))

    def forward(self, ids, labels):
        states, outputs = [torch.zeros(ids.shape[0], WIDTH)] * 2, []
        for h in self.tokens(ids).unbind(1):
            for layer, cell in enumerate(self.cells):
                h = states[layer] = cell(h, states[layer])
            outputs.append(h)
        return F.cross_entropy(torch.stack(outputs, 1).flatten(0, 1) @ self.tokens.weight.t(), labels.flatten())


def tokens(steps):
    ids = torch.randint(9, (3, steps), generator=torch.Generator().manual_seed(0))
    return {"ids": ids, "labels": ids.roll(1, 1)}


@pytest.mark.parametrize("kind", [SumOfLosses, Cells])
def test_time_steps_of_a_recurrent_net(kind):
    assert agrees(kind(), tokens(24))


class Scaled(torch.autograd.Function):
    """Its backward is not what its forward says."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


def special(do):
    """Blocks in a row, of which number 9 does something else."""

    def walk(blocks, x):
        for i, block in enumerate(blocks):
            x = do(block, x) if i == 9 else block(x)
        return x

    return walk


def dense(blocks, x):
    seen = [x]
    for block in blocks:
        seen.append(block(torch.stack(seen).sum(0)))
    return seen[-1]


def replaces_its_buffer(block, x):
    y = block(x)
    block.norm.running_mean = block.norm.running_mean * 0.5
    return y


def without_gradient(block, x):
    with torch.no_grad():
        return block(x)


@pytest.mark.parametrize(
    "walk",
    [
        special(lambda block, x: block(x) + 1),
        special(lambda block, x: block(x, scale=0.5)),
        special(lambda block, x: x),
        special(without_gradient),
        special(replaces_its_buffer),
        special(lambda block, x: block(Scaled.apply(x, 2.0))),
        special(lambda block, x: block(x) if torch.manual_seed(3) else x),
        special(lambda block, x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)),
        dense,
        twice,
        lambda blocks, x: by_index(blocks, x) + blocks[0](x) if len(blocks) > 6 else by_index(blocks, x),
        lambda blocks, x: by_index(blocks, x / len(blocks) ** 0.5),
    ],
)
def test_what_is_special_is_captured_whole(walk):
    assert stamped("micro", Net(walk).train(), x(), None, True) is None


def test_a_frozen_block_a_shared_weight_a_hook_and_another_dropout():
    for change in (
        lambda net: net.blocks[9].fc.weight.requires_grad_(False),
        lambda net: setattr(net.blocks[9].fc, "weight", net.blocks[4].fc.weight),
        lambda net: net.blocks[9].register_forward_hook(lambda module, args, output: output * 2),
        lambda net: net.blocks[9].register_full_backward_hook(lambda module, given, got: (given[0] * 2,)),
        lambda net: setattr(net.blocks[9].dropout, "p", 0.3),
        lambda net: net.blocks[9].eval(),
        lambda net: setattr(net.blocks[9].norm, "eps", 1e-3),
    ):
        net = Net().train()
        change(net)
        assert stamped("micro", net, x(), None, True) is None, change


def test_a_step_that_is_special_is_seen_however_late_it_comes():
    assert stamped("micro", SumOfLosses(special=50), tokens(60), None, True) is None
    assert stamped("micro", SumOfLosses(), tokens(60), None, True) is not None


def test_the_model_is_left_as_it_was_whatever_happens():
    def fails(blocks, x):
        if len(blocks) < 6:
            raise KeyboardInterrupt
        return by_index(blocks, x)

    net = Net(fails).train()
    children, before = list(net.blocks), copy.deepcopy(net.state_dict())
    with pytest.raises(KeyboardInterrupt):
        stamped("micro", net, x(), None, True)
    assert list(net.blocks) == children and list(net.blocks._modules) == [str(i) for i in range(DEPTH)]
    assert all(torch.equal(a, b) for a, b in zip(before.values(), net.state_dict().values()))


def test_questions_are_those_of_the_whole_model():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def forward(self, x, mask):
            self.net.walk = lambda blocks, h: by_index([block for block in blocks if (mask > 0).all()], h)
            return self.net(x)

    batch = {"mask": torch.ones(3, dtype=torch.int64), "x": x()}
    questions = stamped("micro", Asks().train(), batch, None, True).questions
    assert len(questions.asked) == 1  # the same one of every block
    assert questions.hold([torch.full((3,), 2), x()])
    assert not questions.hold([torch.tensor([1, 0, 1]), x()])


def test_a_stamped_step_trains_like_plain_pytorch(monkeypatch):
    seen = []
    monkeypatch.setattr("packhorse.capture.capture.stamped", lambda *args: seen.append(stamped(*args)) or seen[-1])
    torch.manual_seed(0)
    net = Net().train()
    plain = copy.deepcopy(net)
    step = ph.compile(net, ph.plan(net, x(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1)))
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for k in range(2):
        torch.manual_seed(k)
        loss = step(x())
        torch.manual_seed(k)
        theirs.zero_grad()
        wanted = plain(x())
        wanted.backward()
        theirs.step()
        assert torch.equal(loss, wanted.detach())
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), net.state_dict().values()))
    assert seen and seen[0] is not None
    assert capture(net, x(), None, num_micro_batches=2).next is not None
