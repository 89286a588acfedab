"""Steps that draw from generators of the model's own: the numbers of plain PyTorch, whatever happens in between."""

import pytest
import torch
import torch.nn as nn

import packhorse as ph
from packhorse.capture.generators import generators_of
from packhorse.graph.text import parse_graph
from packhorse.graph.verify import verify
from packhorse.planning.persistent import Persistent, make_run
from packhorse.planning.plan import Options, plan_graph
from packhorse.program.lower import lower
from packhorse.runtime.arena import Arena
from packhorse.runtime.executor import BoundProgram
from packhorse.runtime.reference import run_graph
from packhorse.runtime.storage import allocate, views

pytestmark = pytest.mark.cpu

DRAWS = {
    "rand": lambda h, g: h * torch.rand(h.shape, generator=g),
    "randn": lambda h, g: h + torch.randn(4, generator=g),
    "randint": lambda h, g: h * torch.randint(1, 5, (4,), generator=g) + torch.randint(3, (4,), generator=g),
    "randperm": lambda h, g: h[..., torch.randperm(4, generator=g)],
    "like": lambda h, g: h + torch.rand_like(h, generator=g) * torch.randn_like(h, generator=g) + torch.randint_like(h, 3, generator=g),
    "normal": lambda h, g: h + torch.normal(0.0, 2.0, (4,), generator=g) + torch.normal(h.detach(), 1.0, generator=g),
    "normal tensors": lambda h, g: (
        h + torch.normal(1.0, h.detach().sigmoid(), generator=g) * torch.normal(h.detach(), h.detach().sigmoid(), generator=g)
    ),
    "bernoulli": lambda h, g: h * torch.bernoulli(h.detach().sigmoid(), generator=g) + torch.bernoulli(h.detach(), 0.3, generator=g),
    "bernoulli_": lambda h, g: h * torch.empty_like(h).bernoulli_(0.5, generator=g) + torch.empty(4).bernoulli_(torch.full((4,), 0.3), generator=g),
    "uniform_": lambda h, g: h * torch.empty_like(h).uniform_(-1, 1, generator=g) + torch.empty(3, 4).t().uniform_(generator=g).t(),
    "normal_": lambda h, g: h + torch.empty(4).normal_(1, 2, generator=g) + torch.empty(4).log_normal_(generator=g),
    "exponential_": lambda h, g: h + torch.empty(4).exponential_(generator=g) + torch.empty(4).cauchy_(generator=g),
    "random_": lambda h, g: h + torch.empty(4).random_(7, generator=g) + torch.empty(4).geometric_(0.4, generator=g),
    "multinomial": lambda h, g: h * torch.multinomial(torch.ones(9), 4, generator=g),
    "poisson": lambda h, g: (
        h + torch.poisson(h.detach().exp(), generator=g) + torch.binomial(torch.full((4,), 5.0), torch.full((4,), 0.4), generator=g)
    ),
    "init": lambda h, g: h + nn.init.normal_(torch.empty(4), 0.0, 1.0, g) + nn.init.xavier_uniform_(torch.empty(4, 4), generator=g)[0],
}
OUTSIDE = torch.Generator()


class Noisy(nn.Module):
    """Draws from two generators of its own, from one that is nobody's attribute, and from the default one."""

    def __init__(self, draw=DRAWS["rand"]):
        super().__init__()
        self.embed, self.fc, self.draw = nn.Embedding(9, 4), nn.Linear(4, 4), draw
        self.noise = torch.Generator().manual_seed(5)
        self.fc.noise = torch.Generator().manual_seed(6)

    def forward(self, ids, scale):
        h = self.draw(self.embed(ids), self.noise)
        h = self.draw(nn.functional.dropout(self.fc(h), 0.3), self.fc.noise)
        return (h * torch.rand(4, generator=OUTSIDE) * torch.rand(4, generator=self.noise) * scale).square().mean()


BATCH = {"ids": torch.tensor([[1, 2, 0], [3, 4, 8]]), "scale": torch.tensor(1.0)}


def made(draw=DRAWS["rand"], seed=0):
    torch.manual_seed(seed)
    OUTSIDE.manual_seed(seed + 7)
    model = Noisy(draw)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def compiled(draw=DRAWS["rand"], seed=0, **options):
    model, optimizer = made(draw, seed)
    return ph.compile(model, ph.plan(model, BATCH, optimizer=optimizer, **options))


def states(model):
    return [generator.get_state() for generator in (torch.default_generator, OUTSIDE, model.noise, model.fc.noise)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain_losses(draw, num_steps, num_micro_batches=1):
    model, optimizer = made(draw)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        micros = [model(**BATCH) / num_micro_batches for _ in range(num_micro_batches)]
        for micro in micros:
            micro.backward()
        optimizer.step()
        losses.append(sum(micro.item() for micro in micros))
    return losses, model, states(model)


@pytest.mark.parametrize("name", DRAWS)
def test_a_step_draws_what_plain_pytorch_draws(name):
    wanted, plain, after = plain_losses(DRAWS[name], 3)
    step = compiled(DRAWS[name])
    assert [step(BATCH).item() for _ in range(3)] == wanted
    assert same(states(step.model), after)
    assert same(step.model.state_dict().values(), plain.state_dict().values())
    ledger = step.ledger()
    assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes


def test_micro_batches_draw_one_after_another():
    model, optimizer = made()
    first, second = (model(**BATCH) / 2 for _ in range(2))
    (first + second).backward()
    optimizer.step()
    after = states(model)
    step = compiled(num_micro_batches=2)
    assert step([BATCH, BATCH]).item() == (first + second).item()
    assert same(states(step.model), after)
    assert same(step.model.state_dict().values(), model.state_dict().values())


def test_planning_evaluation_and_the_search_for_nan_draw_nothing():
    model, optimizer = made()
    before = states(model)
    step = ph.compile(model, ph.plan(model, BATCH, optimizer=optimizer))
    assert same(states(model), before)
    seen = step.evaluate(BATCH)
    assert same(states(model), before) and seen == step.evaluate(BATCH)
    model.eval()
    assert seen == model(**BATCH).item()  # what it drew is what the generators give
    model.train()
    for generator, state in zip((torch.default_generator, OUTSIDE, model.noise, model.fc.noise), before):
        generator.set_state(state)
    step.trace_nonfinite(BATCH)
    assert same(states(model), before)


@pytest.mark.parametrize("broken", [BATCH | {"scale": torch.tensor(float("nan"))}, BATCH | {"ids": torch.tensor([[1, 2, 0], [3, 4, 99]])}])
def test_after_a_step_that_fails_every_generator_is_as_before(broken):
    wanted, _, after = plain_losses(DRAWS["rand"], 2)
    step = compiled()
    step(BATCH)
    before = states(step.model)
    with pytest.raises(ph.UserError):
        step(broken)
    assert same(states(step.model), before)
    assert step(BATCH).item() == wanted[1] and same(states(step.model), after)


def test_a_resumed_run_goes_on_with_every_generator(tmp_path):
    wanted, _, after = plain_losses(DRAWS["randn"], 4)
    step = compiled(DRAWS["randn"])
    assert [step(BATCH).item() for _ in range(2)] == wanted[:2]
    ph.save(tmp_path / "c", step)
    other = compiled(DRAWS["randn"], seed=1)
    other.model.noise.manual_seed(1)
    other(BATCH)
    ph.load(tmp_path / "c", other)
    assert [other(BATCH).item() for _ in range(2)] == wanted[2:]
    assert same(states(other.model), after)


def test_a_checkpoint_without_the_generator_is_refused(tmp_path):
    step = compiled()
    ph.save(tmp_path / "c", step)
    model, optimizer = made()
    model.other = torch.Generator()
    other = ph.compile(model, ph.plan(model, BATCH, optimizer=optimizer))
    with pytest.raises(ph.CheckpointError, match="'random/generator other' is absent"):
        ph.load(tmp_path / "c", other)


def test_reseeding_between_steps_is_seen_and_another_generator_refused():
    step = compiled()
    model, optimizer = made()
    for seed in (3, 4):
        OUTSIDE.manual_seed(seed)
        model.noise.manual_seed(seed)
        optimizer.zero_grad()
        state = states(model)
        loss = model(**BATCH)
        loss.backward()
        optimizer.step()
        for generator, before in zip((torch.default_generator, OUTSIDE, step.model.noise, step.model.fc.noise), state):
            generator.set_state(before)
        assert step(BATCH).item() == loss.item()
    step.model.noise = torch.Generator()
    with pytest.raises(ph.UserError, match=r"now the model draws from another torch.Generator .* generator noise"):
        step(BATCH)


def test_another_batch_size_draws_from_the_same_generators():
    bigger = BATCH | {"ids": torch.arange(8).view(2, 4)}
    model, _ = made()
    wanted = [model(**BATCH).item(), model(**bigger).item()]
    step = compiled()
    for group in step.job.optimizer.param_groups:
        group["lr"] = 0.0
    assert [step(BATCH).item(), step(bigger).item()] == wanted
    assert step.job.generators == generators_of(step.model) | {"generator 0": OUTSIDE}


def test_a_mirror_draws_again_what_its_original_drew_from_its_generator():
    """The graph that mirroring makes: state saved before the draw, given to the draw's mirror; the chain goes on as if there were none."""
    lines = [
        'input %a0: rng[] = random "default"',
        'input %b0: rng[] = random "generator noise"',
        "%s: u8[5056] = packhorse.random_state.default(generator=<generator generator noise>) rng %b0 -> %b1",
        "%x: f32[8] = aten.rand.generator([8], generator=<generator generator noise>) rng %b1 -> %b2",
        "%y: f32[8] = aten.rand.generator([8], generator=None) rng %a0 -> %a1",
        "%z: f32[8] = aten.rand.generator([8], generator=<generator generator noise>) rng %b2 -> %b3",
        "%again: f32[8] = aten.rand.generator([8], generator=<generator generator noise>, state=%s)",
        'output %x = buffer "x"',
        'output %y = buffer "y"',
        'output %z = buffer "z"',
        'output %again = buffer "again"',
        'output %b3 = random "generator noise"',
    ]
    graph = parse_graph("graph g\n" + "\n".join(line + "  # forward" if "aten" in line or "packhorse" in line else line for line in lines) + "\n")
    verify(graph)
    noise, plain = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    torch.manual_seed(2)
    wanted = {"x": torch.rand(8, generator=plain), "y": torch.rand(8), "z": torch.rand(8, generator=plain)}
    wanted["again"] = wanted["x"]

    torch.manual_seed(2)
    found = run_graph(graph, {}, generators={"generator noise": noise})
    assert all(torch.equal(found["buffer", name], tensor) for name, tensor in wanted.items())
    assert torch.equal(noise.get_state(), plain.get_state())

    persistent = Persistent((make_run("b", "buffers", "buffer", [(name, graph.values[name]) for name in wanted]),))
    planned = plan_graph(graph, persistent, Options())
    memory = allocate(persistent, torch.device("cpu"))
    torch.manual_seed(2)
    noise.manual_seed(3)
    BoundProgram(lower(planned), Arena(planned.arena_bytes, torch.device("cpu")), memory, [], {"generator noise": noise}).run({})
    assert all(torch.equal(views(persistent, memory, "buffer")[name], tensor) for name, tensor in wanted.items())
    assert torch.equal(noise.get_state(), plain.get_state())


def test_any_operator_draws_from_a_stream():
    """The streams of tensor parallel ranks. torch's default generator stays; so does a stream where a draw is drawn again."""
    lines = [
        'input %x: f32[8] = buffer "x"',
        'input %a0: rng[] = random "inside"',
        'input %b0: rng[] = random "outside"',
        "%s: u8[5056] = packhorse.random_state.default(generator=<generator inside>) rng %a0 -> %a1",
        "%y: f32[8], %mask: bool[8] = aten.native_dropout.default(%x, 0.5, True, generator=<generator inside>) rng %a1 -> %a2",
        "%z: f32[8] = aten.rand.generator([8], generator=<generator outside>) rng %b0 -> %b1",
        "%w: f32[8] = aten.rand.generator([8], generator=<generator inside>) rng %a2 -> %a3",
        "%again: f32[8], %mask2: bool[8] = aten.native_dropout.default(%x, 0.5, True, generator=<generator inside>, state=%s)",
        *(f'output %{name} = buffer "{name}"' for name in ("y", "z", "w", "again")),
        'output %a3 = random "inside"',
        'output %b1 = random "outside"',
    ]
    graph = parse_graph("graph g\n" + "\n".join(line + "  # forward" if "aten" in line or "packhorse" in line else line for line in lines) + "\n")
    verify(graph)
    x = torch.arange(1.0, 9.0)

    def wanted():
        """What eager draws from default generators that are where the streams are; and where those are then."""
        found = {}
        torch.manual_seed(3)
        found["y"] = found["again"] = torch.nn.functional.dropout(x, 0.5)
        found["w"] = torch.rand(8)
        inside = torch.get_rng_state()
        torch.manual_seed(4)
        found["z"] = torch.rand(8)
        return found, {"inside": inside, "outside": torch.get_rng_state()}

    expected, ends = wanted()
    generators = {"inside": torch.Generator(), "outside": torch.Generator()}

    def started():
        generators["inside"].manual_seed(3)
        generators["outside"].manual_seed(4)
        torch.manual_seed(2)
        return torch.get_rng_state()

    def ended(found, before):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert all(torch.equal(generators[name].get_state(), end) for name, end in ends.items())
        assert torch.equal(torch.get_rng_state(), before)

    before = started()
    found = run_graph(graph, {"x": x}, generators=generators)
    ended({name: found["buffer", name] for name in expected}, before)

    held = {"x": graph.values["x"]} | {name: graph.values[name] for name in expected}
    persistent = Persistent((make_run("b", "buffers", "buffer", list(held.items())),))
    planned = plan_graph(graph, persistent, Options())
    memory = allocate(persistent, torch.device("cpu"))
    views(persistent, memory, "buffer")["x"].copy_(x)
    before = started()
    BoundProgram(lower(planned), Arena(planned.arena_bytes, torch.device("cpu")), memory, [], generators).run({})
    ended(views(persistent, memory, "buffer"), before)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.noise = nn.Linear(64, 64), torch.Generator().manual_seed(1)

    def forward(self, x):
        h = self.fc(x).tanh() * torch.rand(x.shape, generator=self.noise) * torch.rand(x.shape, generator=OUTSIDE)
        return x + nn.functional.dropout(h, 0.1)


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_recomputed_draws_change_no_bit():
    x, runs = torch.linspace(-1, 1, 64 * 64).view(64, 64), []
    for planned in (False, True):
        torch.manual_seed(0)
        OUTSIDE.manual_seed(2)
        model = Blocks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if planned:
            step = ph.compile(model, ph.plan(model, x, optimizer=optimizer, recompute="sqrt"))
            again = [n.generator for n in step.plan.programs["first"].graph.nodes if n.phase == "recompute" and "state" in dict(n.kwargs)]
            assert {"default", "generator 0", "generator blocks.0.noise"} <= set(again)
        losses = []
        for _ in range(3):
            if planned:
                losses.append(step(x).item())
            else:
                optimizer.zero_grad()
                loss = model(x)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        generators = [torch.default_generator, OUTSIDE, *(block.noise for block in model.blocks)]
        runs.append((losses, [*model.state_dict().values(), *(generator.get_state() for generator in generators)]))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])
