"""Which generators a model has, and what a trace does to them: nothing. Seeding in the forward pass is found out."""

import pytest
import torch
import torch.nn as nn

import packhorse as ph
from packhorse.capture.capture import capture, capture_evaluation
from packhorse.capture.generators import generators_of
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify

pytestmark = pytest.mark.cpu
GLOBAL = torch.Generator().manual_seed(3)


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.fc, self.step = nn.Linear(4, 4), forward
        self.noise = torch.Generator().manual_seed(5)
        self.fc.noise, self.fc.same = torch.Generator().manual_seed(6), self.noise

    def forward(self, x):
        return self.step(self, self.fc(x)).sum()


def test_names_are_paths_of_attributes_each_generator_once():
    model = Model(None)
    model.usual = torch.default_generator
    assert generators_of(model) == {"generator noise": model.noise, "generator fc.noise": model.fc.noise}


def three_chains(model, h):
    h = h * torch.rand(h.shape, generator=model.noise) + torch.rand(4)
    h = nn.functional.dropout(h) * torch.empty(4).normal_(generator=GLOBAL)
    return h * torch.bernoulli(torch.full((4,), 0.5), generator=model.noise) * torch.rand(4, generator=torch.default_generator)


def test_one_chain_for_each_generator_and_nothing_drawn():
    model = Model(three_chains)
    every = [torch.default_generator, model.noise, model.fc.noise, GLOBAL]
    before = [generator.get_state() for generator in every]
    captured = capture(model, torch.ones(2, 4), None, num_micro_batches=2)
    capture_evaluation(model, torch.ones(2, 4), None)
    assert all(torch.equal(state, generator.get_state()) for state, generator in zip(before, every))
    assert captured.generators == {"generator noise": model.noise, "generator fc.noise": model.fc.noise, "generator 0": GLOBAL}
    for graph in (captured.micro, captured.first, captured.next):
        verify(graph)
        assert parse_graph(print_graph(graph)) == graph
    graph = captured.micro
    draws = [node for node in graph.nodes if node.rng_in]
    assert [node.generator for node in draws] == ["generator noise", "default", "default", "generator 0", "generator noise", "default"]
    for chain in ("default", "generator noise", "generator 0"):
        states = [i.value.name for i in graph.inputs if (i.role, i.target) == ("random", chain)]
        for node in draws:
            if node.generator == chain:
                assert node.rng_in == states[-1]
                states.append(node.rng_out)
        assert [o.name for o in graph.outputs if (o.role, o.target) == ("random", chain)] == states[-1:]
        assert len(states) == 1 + sum(node.generator == chain for node in draws)


def made_anew(model, h):
    return h * torch.rand(4, generator=torch.Generator().manual_seed(0))


def seeded(model, h):
    GLOBAL.manual_seed(3)
    return h * torch.rand(4, generator=GLOBAL)


def wound_back(model, h):
    state = model.noise.get_state()
    h = h * torch.rand(4, generator=model.noise)
    model.noise.set_state(state)
    return h


def default_seeded(model, h):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return h * torch.rand(4)


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.rand(4, generator=GLOBAL)


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (made_anew, "at test_generators.py:.* makes a torch.Generator in the forward pass"),
        (seeded, r"seeds the generator 0 or sets its state \(seen at module .* at test_generators.py:"),
        (wound_back, "seeds the generator noise or sets its state"),
        (lambda model, h: (model.noise.manual_seed(1), h)[1], r"seeds the generator noise or sets its state \(seen at its end\)"),
        (default_seeded, "seeds torch's default generator .*test_generators.py:"),
        (lambda model, h: OwnBackward.apply(h), "at test_generators.py:.* uses a Generator of its own where"),
        (lambda model, h: h * 2 if torch.rand(1, generator=GLOBAL) < 0.5 else h, "at test_generators.py:.*a random draw decides"),
        (lambda model, h: h * 2 if torch.randint(2, (4,), generator=GLOBAL).any() else h, "at test_generators.py:.*looks at the values"),
    ],
)
def test_what_would_be_done_once_and_not_at_every_step_is_refused(forward, text):
    model = Model(forward)
    before = [torch.get_rng_state(), model.noise.get_state(), GLOBAL.get_state()]
    with pytest.raises(ph.CaptureError, match=text):
        capture(model, torch.ones(2, 4), None)
    after = [torch.get_rng_state(), model.noise.get_state(), GLOBAL.get_state()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
