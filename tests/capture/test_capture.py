"""What a capture knows: places, phases, random chains, tied and frozen parameters, constants, ways of calling."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import packhorse as ph
from packhorse.capture.capture import capture
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify
from packhorse.runtime.reference import run_graph
from zoo import MLP, MODELS, ConvNet, batch_for, gpt

pytestmark = pytest.mark.cpu


def inputs_for(graph, model, batch, captured, seed=1.0):
    tables = {"param": dict(model.named_parameters()), "buffer": dict(model.named_buffers()), "batch": batch}
    tables["constant"] = {**captured.constants, "seed": torch.tensor(seed)}
    return {i.value.name: tables[i.role][i.target].detach() for i in graph.inputs if i.role != "random"}


@pytest.mark.parametrize("name", MODELS)
def test_the_oracle_on_the_captured_graph_equals_autograd(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    batch = batch_for(model)
    captured = capture(model, batch, None)
    verify(captured.micro)
    assert parse_graph(print_graph(captured.micro)) == captured.micro
    inputs = inputs_for(captured.micro, model, batch, captured)
    torch.manual_seed(2)
    found = run_graph(captured.micro, inputs)
    torch.manual_seed(2)
    loss = model(**batch)
    loss.backward()
    assert torch.equal(found["metric", "loss"], loss.detach())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {t for r, t in found if r == "grad"} == set(grads) == captured.trained()
    assert all(torch.equal(found["grad", n], g) for n, g in grads.items())
    assert all(torch.equal(found["buffer", n], b) for n, b in model.named_buffers() if ("buffer", n) in found)


def test_every_node_knows_module_line_and_phase():
    graph = capture(gpt().train(), batch_for(gpt()), None).micro
    up = [n for n in graph.nodes if n.module == "blocks.1.feed_forward.up"]
    assert {n.phase for n in up} == {"forward", "backward"}
    assert all(n.source for n in graph.nodes), [n.op for n in graph.nodes if not n.source]
    assert {n.source.split(":")[0] for n in graph.nodes} == {"gpt.py"}
    first_backward = next(i for i, n in enumerate(graph.nodes) if n.phase == "backward")
    assert all(n.phase == "backward" for n in graph.nodes[first_backward:] if not n.is_view)


def test_random_nodes_form_one_chain_in_forward_order():
    graph = capture(gpt(dropout=0.1).train(), batch_for(gpt()), None).micro
    draws = [n for n in graph.nodes if n.rng_in]
    assert [n.rng_in for n in draws] == [f".rng{k}" for k in range(len(draws))]
    assert all(n.phase == "forward" for n in draws) and len(draws) == 1 + 3 * 2
    assert not any(n.rng_in for n in capture(gpt(dropout=0.1).eval(), batch_for(gpt()), None).micro.nodes)


def test_tied_weights_are_one_parameter_with_one_gradient():
    model = gpt()
    assert model.head.weight is model.tokens.weight
    graph = capture(model, batch_for(model), None).micro
    assert sum(i.target in ("head.weight", "tokens.weight") for i in graph.inputs) == 1


def test_frozen_and_unused_parameters_have_no_gradient():
    captured = capture(MLP().train(), batch_for(MLP()), None)
    assert captured.trained() == {"inner.weight", "inner.bias", "twice.weight", "twice.bias", "scale", "out.weight", "out.bias"}


def test_batch_statistics_are_outputs_and_move_once():
    graph = capture(ConvNet().train(), batch_for(ConvNet()), None).micro
    moved = {o.target for o in graph.outputs if o.role == "buffer"}
    assert moved == {f"{n}.{s}" for n in ("norm", "norm2") for s in ("running_mean", "running_var", "num_batches_tracked")}


def trained_like_eager(model, batch, loss=None, steps=3):
    """Steps of both; True if loss and parameters stay equal."""
    plain = copy.deepcopy(model)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    step = ph.compile(model, ph.plan(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), loss=loss))
    for k in range(steps):
        torch.manual_seed(k)
        theirs.zero_grad()
        out = plain(**batch) if isinstance(batch, dict) else plain(*batch) if isinstance(batch, tuple) else plain(batch)
        value = loss(out, batch) if loss else out
        value.backward()
        theirs.step()
        torch.manual_seed(k)
        assert torch.equal(step(batch), value.detach())
    return all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.table = torch.arange(6.0)  # neither parameter nor buffer

    def forward(self, x, scale=2.0):
        self.seen += 1  # in place on a buffer
        h = self.fc(x) * scale + self.table + self.seen
        h[:, 0] = 0.5  # in place on part of a value
        h.mul_(torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0, 1.0]))
        return h.pow(2).mean()


@pytest.mark.parametrize("batch", [{"x": torch.ones(3, 6), "scale": 1.5}, (torch.ones(3, 6), 0.5), torch.ones(3, 6)], ids=["dict", "tuple", "tensor"])
def test_ways_of_calling_constants_and_in_place_code(batch):
    torch.manual_seed(0)
    assert trained_like_eager(Calls(), batch)


def test_a_batch_with_holes_in_memory():
    torch.manual_seed(0)
    big = torch.randn(6, 9)
    assert trained_like_eager(Calls(), {"x": big[::2, 3:]})
    assert trained_like_eager(Calls(), {"x": torch.randn(6, 3).t()})
    assert trained_like_eager(Calls(), {"x": torch.randn(1, 6).expand(3, 6)})


def test_channels_last_convolution_keeps_its_layout():
    torch.manual_seed(0)
    model = ConvNet().to(memory_format=torch.channels_last)
    batch = batch_for(model)
    batch["x"] = batch["x"].contiguous(memory_format=torch.channels_last)
    assert trained_like_eager(model, batch)
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_loss_function_sees_output_and_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))
    batch = (torch.randn(3, 6),)
    assert trained_like_eager(model, batch, loss=lambda out, given: (out - given[0][:, :4]).abs().mean())


def test_one_gradient_for_two_parameters_and_a_parameter_returned_as_it_is():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            return ((self.a + self.b) * x).sum()

    assert trained_like_eager(Sum(), torch.arange(4.0))


def test_zero_size_and_scalar_tensors():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.s, self.e = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(0, 3))

        def forward(self, x):
            return (self.s * x).sum() + (x[:0] @ torch.ones(2, 3) * self.e).sum()

    assert trained_like_eager(Odd(), torch.randn(3, 2))


def test_shared_module_and_sequence_of_losses():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.norm = nn.GRUCell(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            h = torch.zeros(x.shape[1], 4)
            loss = 0.0
            for step in x:
                h = self.norm(self.cell(step, h))
                loss = loss + F.mse_loss(h, step)
            return loss

    torch.manual_seed(0)
    assert trained_like_eager(Shared(), torch.randn(3, 5, 4))
