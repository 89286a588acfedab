"""What recomputation gets wrong elsewhere, each trap with plain PyTorch's own result beside it."""

import copy
import itertools
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import packhorse as ph
from beside_plain import METHODS, Plain, adamw, assert_as_predicted, assert_methods_like_plain, assert_same, loss_of, num_mirrors, plans_of
from packhorse.errors import CaptureError, UserError
from packhorse.graph.text import parse_graph
from packhorse.graph.verify import verify
from packhorse.recompute.facts import facts_of
from packhorse.recompute.mirror import replay
from packhorse.recompute.rules import evenly
from packhorse.recompute.simulate import bytes_of
from packhorse.recompute.table import METHODS as METHODS_BY_NAME

pytestmark = pytest.mark.cpu

ROWS, WIDTH = 64, 32


def batch(rows: int = ROWS, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, WIDTH, generator=g), "y": torch.randint(0, 5, (rows,), generator=g)}


def images(rows: int = 4) -> dict:
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(rows, 3, 16, 16, generator=g), "y": torch.randint(0, 5, (rows,), generator=g)}


class Stack(nn.Module):
    """x (N, D) through `blocks`, a linear layer, and the cross entropy with y (N,)."""

    def __init__(self, *blocks: nn.Module, width: int = WIDTH):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 5)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), y)


class Block(nn.Module):
    """x + a dropped-out MLP of its norm."""

    def __init__(self, width: int = WIDTH, p: float = 0.2):
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width), p

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.p, self.training)


class Call(nn.Module):
    """A linear layer and any function of its result."""

    def __init__(self, function, width: int = WIDTH):
        super().__init__()
        self.fc, self.function = nn.Linear(width, width), function

    def forward(self, x):
        return torch.tanh(self.function(self.fc(x)))


def made(*blocks: nn.Module, **options) -> Stack:
    torch.manual_seed(0)
    for block in blocks:
        for p in block.parameters():
            nn.init.normal_(p, std=0.2)
    return Stack(*blocks, **options).train()


# -- state -----------------------------------------------------------------------------------------------------------------------------


class ConvBlock(nn.Module):
    """conv, batch norm, relu in place, and max-pool last: its indices are saved, and nothing of its input."""

    def __init__(self, channels: int, out: int, **norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out, **norm)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2)


def test_statistics_of_batch_norm_move_once_a_step():
    torch.manual_seed(0)
    blocks = ConvBlock(3, 8), ConvBlock(8, 8, momentum=0.5), ConvBlock(8, 8, track_running_stats=False), ConvBlock(8, 8)
    model = Stack(*blocks, nn.Flatten(), width=8)
    blocks[3].norm.eval()  # frozen statistics amid training
    plans = assert_methods_like_plain(model, images())
    norms = ("_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
    assert any(n.phase == "recompute" and n.op.split(".")[1] in norms for p in plans.values() for n in p.programs["first"].graph.nodes)
    pooling = "aten.max_pool2d_with_indices.default"
    assert any(n.phase == "recompute" and n.op == pooling for p in plans.values() for n in p.programs["first"].graph.nodes)


def test_several_micro_batches_move_statistics_once_each():
    torch.manual_seed(0)
    model = Stack(ConvBlock(3, 8), ConvBlock(8, 8), nn.Flatten(), width=8 * 4 * 4)
    micros = [images() | {"x": torch.randn(4, 3, 16, 16)} for _ in range(3)]
    for _, mine, plan in plans_of(model, micros, ("blocks", "optimal"), clip_norm=1.0):
        step = ph.compile(mine, plan)
        step(micros)
        assert mine.blocks[0].norm.num_batches_tracked == 3
    assert_methods_like_plain(model, micros, methods=("cheap", "recursive"))


class Codebook(nn.Module):
    """A codebook that is a moving average (van den Oord et al. 2017), and a counter: buffers that a forward changes and reads."""

    def __init__(self, width: int = WIDTH, codes: int = 6):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("used", torch.ones(codes))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.fc(x)
        nearest = torch.cdist(h.detach(), self.codes).argmin(-1)
        hits = F.one_hot(nearest, len(self.codes)).to(h.dtype)
        with torch.no_grad():
            self.count += 1
            self.used.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(0.1 * (hits.T @ h) / self.used[:, None])
        quantised = self.codes[nearest] * self.count
        return x + h + (quantised - h).detach() * 0.1


def test_buffers_that_a_forward_changes_are_written_once():
    model = made(Codebook(), Block(), Codebook())
    plans = assert_methods_like_plain(model, batch())
    assert plans["recursive"].programs["first"].graph.outputs


def test_every_draw_is_made_again_bit_for_bit():
    torch.manual_seed(0)
    assert_methods_like_plain(EveryDraw(), batch(), methods=("cheap", "recursive"))


@pytest.mark.parametrize("precision, methods", [("fp32", ("sqrt", "chen")), ("bf16", ("cheap", "optimal")), ("fp16", ("recursive", "blocks"))])
def test_draws_over_several_micro_batches_in_every_precision(precision, methods):
    micros = [batch(seed=seed) for seed in range(3)]
    model = made(Block(), Call(lambda h: h * torch.empty_like(h).bernoulli_(0.5)), Block(), Call(lambda h: F.gumbel_softmax(h) + torch.rand_like(h)))
    assert_methods_like_plain(model, micros, methods=methods, precision=precision)


def _attention(h):
    q = h.view(-1, 4, 8, 4)
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3).reshape(h.shape)


DRAWS = {
    "dropout": lambda h: F.dropout(h, 0.3),
    "dropout1d": lambda h: F.dropout1d(h.view(-1, 4, 8), 0.3).view(-1, WIDTH),
    "dropout2d": lambda h: F.dropout2d(h.view(-1, 4, 2, 4), 0.3).view(-1, WIDTH),
    "dropout3d": lambda h: F.dropout3d(h.view(-1, 4, 2, 2, 2), 0.3).view(-1, WIDTH),
    "alpha_dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "feature_alpha_dropout": lambda h: F.feature_alpha_dropout(h.view(-1, 4, 8), 0.3, training=True).view(-1, WIDTH),
    "attention": _attention,
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "bernoulli": lambda h: h * torch.bernoulli(h.detach().sigmoid()),
    "rand_like": lambda h: h + 0.1 * torch.rand_like(h),
    "randn": lambda h: h + 0.1 * torch.randn(WIDTH),
    "normal_": lambda h: h + torch.empty_like(h).normal_(0, 0.1),
    "gumbel_softmax": lambda h: F.gumbel_softmax(h, hard=True) + h,
    "uniform_": lambda h: h * torch.empty_like(h).uniform_(0.5, 1),
    "exponential_": lambda h: h + 0.1 * torch.empty_like(h).exponential_(),
    "randint": lambda h: h * torch.randint(1, 3, (WIDTH,)),
    "randperm": lambda h: h[:, torch.randperm(WIDTH)],
    "multinomial": lambda h: h * torch.multinomial(torch.ones(WIDTH), WIDTH),
    "rrelu": lambda h: F.rrelu(h, training=True),
}


class EveryDraw(Stack):
    def __init__(self):
        super().__init__(*(Call(draw) for draw in DRAWS.values()))


OUTSIDE = torch.Generator()


class Noisy(nn.Module):
    """Draws from generators of its own, one used twice, from one of nobody, and from torch's."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.noise = torch.Generator().manual_seed(3)

    def forward(self, x, y):
        h = torch.tanh(self.first(x)) * torch.rand(ROWS, WIDTH, generator=self.noise)
        h = F.dropout(torch.tanh(self.second(h)), 0.3) + torch.randn(ROWS, WIDTH, generator=OUTSIDE)
        h = torch.tanh(h) * torch.empty_like(h).bernoulli_(0.5, generator=self.noise)
        return F.cross_entropy(self.head(h), y)


def test_generators_of_the_model_are_wound_back_and_forward_again():
    def fresh():
        torch.manual_seed(0)
        OUTSIDE.manual_seed(4)
        return Noisy()

    def states(model):
        return torch.get_rng_state(), OUTSIDE.get_state(), model.noise.get_state()

    def steps(model, take):
        torch.manual_seed(5)
        return [take(model) for _ in range(3)], states(model)

    plain = fresh()
    optimizer = adamw(plain.parameters())

    def eager(model):
        optimizer.zero_grad()
        loss = model(**batch())
        loss.backward()
        optimizer.step()
        return loss.item()

    wanted, after = steps(plain, eager)
    again = set()
    for method in ("cheap", "recursive", "optimal"):
        mine = fresh()
        plan = ph.plan(mine, batch(), optimizer=adamw(mine.parameters()), recompute=method, budget="minimum")
        again |= {n.generator for n in plan.programs["first"].graph.nodes if n.phase == "recompute" and "state" in dict(n.kwargs)}
        step = ph.compile(mine, plan)
        got, then = steps(mine, lambda _, step=step: step(batch()).item())
        assert got == wanted, method
        assert all(torch.equal(a, b) for a, b in zip(after, then, strict=True)), method
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mine.parameters()))
        assert_as_predicted(step, method)
    assert again == {"default", "generator noise", "generator 0"}


# -- who gets a gradient, who is used twice ----------------------------------------------------------------------------------------------


def test_frozen_first_layers():
    model = made(*(Block() for _ in range(4)))
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    assert_methods_like_plain(model, batch())


class Twice(nn.Module):
    """One block used in two regions, an embedding that is the head too."""

    def __init__(self):
        super().__init__()
        self.tokens, self.block, self.other = nn.Embedding(11, WIDTH), Block(), Block()

    def forward(self, ids, labels):
        x = self.block(self.other(self.block(self.tokens(ids))))
        return F.cross_entropy(F.linear(x, self.tokens.weight).flatten(0, 1), labels.flatten())


TOKENS = {"ids": torch.arange(64).view(4, 16) % 11, "labels": torch.arange(64).view(4, 16) % 7}


@pytest.mark.parametrize("precision, methods", [("fp32", METHODS), ("bf16", ("sqrt", "recursive", "optimal")), ("fp16", ("cheap", "chen"))])
def test_shared_weights_and_a_block_in_two_regions(precision, methods):
    torch.manual_seed(0)
    assert_methods_like_plain(Twice(), TOKENS, methods=methods, precision=precision)


class Autocast(nn.Module):
    """autocast inside of the model: each region in a dtype of its own, a mirror in that of its original."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(), nn.Linear(WIDTH, 5)

    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.block(x)
        x = self.block(x.float())
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return F.cross_entropy(self.head(self.block(x)).float(), y)


def test_autocast_inside_of_the_model():
    torch.manual_seed(0)
    assert_methods_like_plain(Autocast(), batch())


# -- what goes in and comes out of a block -----------------------------------------------------------------------------------------------


class WritesIntoItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, state: dict) -> dict:
        state["h"] = torch.tanh(self.fc(state["h"]))
        state["h"] = state["h"] + torch.sigmoid(self.gate(state.pop("skip", state["h"])))
        state["skip"] = state["h"].mul_(0.5) * 2
        return state


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(WritesIntoItsInput() for _ in range(4)), nn.Linear(WIDTH, 5)

    def forward(self, x, y):
        state = {"h": x * 1.0}
        for block in self.blocks:
            block(state)
        return F.cross_entropy(self.head(state["h"] + state["skip"]), y)


def test_a_block_that_writes_into_its_dict():
    torch.manual_seed(0)
    assert_methods_like_plain(Passing(), batch())


class WritesIntoTheBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 5)

    def forward(self, given):
        x = given["x"]
        for k, block in enumerate(self.blocks):
            given[f"h{k}"] = x = block(x)
        return F.cross_entropy(self.head(given["h2"] + given["h0"]), given["y"])


def test_a_model_that_writes_into_the_dict_that_it_is_given():
    torch.manual_seed(0)
    given = {"given": batch()}
    step_keys = set(given["given"])
    plain = Plain(WritesIntoTheBatch(), [{"given": dict(given["given"])}])
    torch.manual_seed(0)
    model = WritesIntoTheBatch()
    for method in ("blocks", "optimal"):
        mine = copy.deepcopy(model)
        plan = ph.plan(mine, given, optimizer=adamw(mine.parameters()), clip_norm=1.0, recompute=method, budget="minimum")
        assert_same(ph.compile(mine, plan), given, plain, method)
        assert set(given["given"]) == step_keys


@dataclass
class Parts:
    main: torch.Tensor
    side: list


class ReturnsParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, parts: Parts) -> Parts:
        h = self.a(parts.main)
        low, high = (part for part in self.b(h).chunk(2, -1))
        return Parts(torch.cat([high, low], -1), [*parts.side, low.mean(), (h.amax(-1), h.argmax(-1))])


@dataclass
class Output:
    loss: torch.Tensor
    parts: Parts


class ReturnsOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(ReturnsParts() for _ in range(2)), nn.Linear(WIDTH, 5)

    def forward(self, x, y):
        parts = Parts(x, [])
        for block in self.blocks:
            parts = block(parts)
        return Output(F.cross_entropy(self.head(parts.main), y) + sum(parts.side[::2]) + parts.side[1][0].mean(), parts)


def test_dataclasses_between_blocks_and_out_of_the_model():
    torch.manual_seed(0)
    assert_methods_like_plain(ReturnsOutput(), batch())


class ReturnsTuple(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        found = []
        for block in self.blocks:
            x = block(x)
            found.append(x)
        return x, tuple(found)


def test_tuples_out_of_the_model():
    torch.manual_seed(0)
    assert_methods_like_plain(ReturnsTuple(), (batch()["x"],), loss=lambda output, _: output[0].square().mean() + output[1][0].abs().mean())


# -- decisions that a mirror must not take anew --------------------------------------------------------------------------------------------


class Router(nn.Module):
    """Top-2 of six experts by scores with many ties: a mirror that broke one otherwise would send a token to another expert."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 6, bias=False), nn.Parameter(torch.randn(6, WIDTH, WIDTH) * 0.2)

    def forward(self, x):
        score = self.router(x).round().clamp(-1, 1)  # three values for six experts
        weight, chosen = (score + self.router(x) * 0).softmax(-1).topk(2)
        order = chosen.flatten().argsort()  # not a stable sort
        mixed = torch.einsum("nd,nkdf->nkf", x, self.experts[chosen]) * weight[..., None]
        return x + mixed.sum(1) + mixed.flatten(0, 1)[order].sum() * 1e-3


def test_a_router_whose_scores_tie():
    model = made(Router(), Block(), Router())
    score = model.blocks[0].router(batch()["x"]).round().clamp(-1, 1)
    assert (score.sort(-1).values.diff(dim=-1) == 0).any()
    assert_methods_like_plain(model, batch())


def test_nine_layers_in_five_segments():
    assert evenly(list(range(9)), 5) == [0, 2, 4, 6, 8]  # 2 2 2 2 1, not 1 1 1 1 5
    for n in range(1, 40):
        for k in range(1, 12):
            starts = [*evenly(list(range(n)), k), n]
            lengths = [b - a for a, b in itertools.pairwise(starts)]
            assert starts[0] == 0 and sum(lengths) == n and len(lengths) == min(n, k) and max(lengths) - min(lengths) <= 1
    assert_methods_like_plain(made(*(Block() for _ in range(9))), batch(16), methods=("sqrt", "recursive"))


def test_modes_that_change_between_steps():
    model, given = made(Block(), ConvFree(), Block()), batch()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain.parameters())
    step = ph.compile(model, ph.plan(model, given, optimizer=adamw(model.parameters()), recompute="recursive", budget="minimum"))

    def eager():
        optimizer.zero_grad()
        loss = plain(**given)
        loss.backward()
        optimizer.step()
        return loss.item()

    for mode in (True, False, True, True):
        plain.train(mode), model.train(mode)
        torch.manual_seed(7)
        wanted = eager()
        torch.manual_seed(7)
        assert step(given).item() == wanted
        model.eval()  # neither this nor an evaluation is seen by the training program
        step.evaluate(given)
        assert_as_predicted(step)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))


class ConvFree(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return F.dropout(torch.relu(self.norm(self.fc(x))), 0.1, self.training)


# -- tensors of no bytes ------------------------------------------------------------------------------------------------------------------


class Empty(nn.Module):
    """Rows without columns, and columns without rows, through operators of every kind."""

    def __init__(self):
        super().__init__()
        self.none, self.fc = nn.Linear(0, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        nothing = F.dropout(torch.tanh(x[:, :0] * 2.0), 0.5)
        h = torch.cat([nothing, torch.relu(self.fc(x))], -1)
        return h + self.none(nothing) + torch.sigmoid(self.fc(x[:0])).sum()


def test_tensors_of_no_bytes():
    assert_methods_like_plain(made(Empty(), Block(), Empty()), batch())


# -- what is refused ----------------------------------------------------------------------------------------------------------------------


class ChangesItsWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.fc(x))
        with torch.no_grad():
            self.fc.weight.mul_(0.5)
        return h


def test_a_parameter_changed_between_its_forward_and_its_backward_is_refused():
    model = made(ChangesItsWeight(), Block())
    with pytest.raises(CaptureError, match=r"fc\.weight"):
        ph.plan(model, batch(), optimizer=adamw(model.parameters()), recompute="blocks")


class CallsBackward(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.fc(x))
        h.sum().backward(retain_graph=True)
        return h


def test_a_second_backward_is_refused_by_name():
    model = made(Block(), Block())
    step = ph.compile(model, ph.plan(model, batch(), optimizer=adamw(model.parameters()), recompute="blocks"))
    loss = step(batch())
    for again in (loss.backward, lambda: loss.backward(retain_graph=True)):
        with pytest.raises(UserError, match=r"no graph is kept.*step\.grads\(\)"):
            again()
    model = made(CallsBackward())
    with pytest.raises(CaptureError, match=r"test_traps.py:\d+, the code calls backward\(\)"):
        ph.plan(model, batch(), optimizer=adamw(model.parameters()), recompute="blocks")


class Penalty(nn.Module):
    """A gradient inside of the forward pass, and its own gradient through it (Gulrajani et al. 2017, arXiv:1704.00028)."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = Block(), Block(p=0.0), nn.Linear(WIDTH, 5)

    def forward(self, x, y):
        h = self.a(x)
        (slope,) = torch.autograd.grad(torch.tanh(self.b(h)).square().sum(), h, create_graph=True)
        return F.cross_entropy(self.head(self.b(h)), y) + (slope.norm(dim=-1) - 1).square().mean()


def test_a_gradient_inside_of_the_forward_pass():
    torch.manual_seed(0)
    assert_methods_like_plain(Penalty(), batch())


# -- the rest of a step's life ------------------------------------------------------------------------------------------------------------


def tight(model, given, method="optimal", **options):
    return ph.compile(model, ph.plan(model, given, optimizer=adamw(model.parameters()), recompute=method, budget="minimum", **options))


@pytest.mark.parametrize("method, precision", [("optimal", "fp32"), ("recursive", "fp16")])
def test_a_run_that_was_killed_goes_on_as_if_nothing_had_happened(tmp_path, method, precision):
    given = [batch(seed=seed) for seed in range(2)]
    options = {"precision": precision, "num_micro_batches": 2, "clip_norm": 1.0}

    def fresh():
        torch.manual_seed(1)
        return made(Block(), Codebook(), Call(lambda h: h + torch.rand_like(h)))

    whole = tight(fresh(), given, method, **options)
    torch.manual_seed(3)
    wanted = [whole(given).item() for _ in range(4)]
    first = tight(fresh(), given, method, **options)
    torch.manual_seed(3)
    assert [first(given).item() for _ in range(2)] == wanted[:2]
    ph.save(tmp_path / "c", first)
    model = fresh()
    for p in model.parameters():
        nn.init.zeros_(p)
    other = tight(model, given, "cheap" if method == "optimal" else method, **options)  # another plan of the same step: the same bits
    torch.manual_seed(99)
    ph.load(tmp_path / "c", other)
    assert [other(given).item() for _ in range(2)] == wanted[2:]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.state_dict().values(), model.state_dict().values()))


def test_evaluation_and_batches_of_other_sizes_under_a_tight_budget():
    model, given = made(*(Block() for _ in range(4))), batch()
    plain = copy.deepcopy(model)
    budget = next(plans_of(model, given, ("optimal",), clip_norm=1.0))[2].peak_bytes
    for _, mine, plan in plans_of(model, given, ("optimal",), budget=budget, clip_norm=1.0):
        assert plan.peak_bytes <= budget
        step = ph.compile(mine, plan)
    assert step.evaluate(given) == plain.eval()(**given).item()
    small, large = batch(ROWS // 2, seed=1), batch(ROWS * 8, seed=2)
    optimizer = adamw(plain.train().parameters())
    for micro in (small, given, small):
        optimizer.zero_grad()
        torch.manual_seed(1)
        loss = loss_of(plain, micro, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        torch.manual_seed(1)
        assert torch.equal(step(micro), loss.detach())
        assert_as_predicted(step)
        assert step.ledger().measured_peak_bytes <= budget
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(ph.BudgetError, match=rf"x \[{ROWS * 8}, {WIDTH}\].* above the budget"):
        step(large)
    assert step.evaluate(given) == plain.eval()(**given).item()
    assert all(torch.equal(before[name], tensor) for name, tensor in step.state_dict().items())


class Breaks(nn.Module):
    """The square root of what may be negative."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.dropout(torch.tanh(self.fc(x)), 0.2, self.training) + torch.sqrt(x.sum(-1, keepdim=True).abs() - 1e-3)


def test_nan_is_traced_through_mirrors():
    model = made(Block(), Breaks(), Block())
    step = tight(model, batch(), "blocks")
    assert num_mirrors(step.plan)
    assert step.trace_nonfinite(batch()).startswith("every tensor")
    broken = batch()
    with torch.no_grad():
        broken["x"].zero_()
        model.blocks[0].down.weight.zero_(), model.blocks[0].down.bias.zero_()
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    with pytest.raises(ph.NonFiniteError):
        step(broken)
    assert torch.equal(torch.get_rng_state(), before)
    found = step.trace_nonfinite(broken)
    assert "aten.sqrt" in found and "blocks.1" in found and torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_a_graph_in_which_nothing_has_bytes():
    """A knapsack of nothing: every method answers, and there is nothing to gain."""
    lines = ['input %x: f32[0] = batch "x"', 'input %w: f32[0] = param "w"']
    names = ["x", *(f"v{k}" for k in range(6))]
    lines += [f"%{b}: f32[0] = aten.tanh.default(%{a})  # forward" for a, b in pairwise(names)]
    lines += [f"%g{k}: f32[0] = aten.mul.Tensor(%v{k}, %w)  # backward" for k in reversed(range(6))]
    lines += ['output %g0 = grad "w"']
    graph = parse_graph("graph g\n" + "\n".join(lines) + "\n")
    verify(graph)
    facts = facts_of(graph, {("param", "w"): ("p", 0, (1,)), ("grad", "w"): ("g", 0, (1,))}, [0.0] * len(graph.nodes))
    assert set(facts.sizes) == {0}
    for name, method in METHODS_BY_NAME.items():
        for limit in (None, 0, 100):
            orders = method(facts, limit)
            assert orders or name == "milp", name
            for order in orders:
                verify(replay(graph, order))
                assert bytes_of(facts, order).peak == 0
