"""What parked values cost, beside the layout and the timeline of the parked graph; budgets; what is refused; programs made later."""

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch

import packhorse as ph
import packhorse.planning.choose as choosing
from packhorse.device.device import format_device, load_device
from packhorse.device.links import Level, Link
from packhorse.errors import UserError
from packhorse.graph.ir import Graph
from packhorse.graph.liveness import lifespans
from packhorse.graph.operators import OWN_SLICE
from packhorse.models.gpt import GPT
from packhorse.planning.plan import plan_graph
from packhorse.planning.residency import Price, Terrain, host_budget_bytes, unbeaten
from packhorse.planning.timeline import timeline
from packhorse.recompute.facts import facts_of
from packhorse.recompute.mirror import order_of, replay
from packhorse.residency.park import park, seconds_by_result
from packhorse.residency.saved import Residency, saved_values
from zoo import MODELS, batch_for

pytestmark = pytest.mark.cpu
CPU = load_device()
LINKS = (None, Link(1e-5, 4e9), Link(1e-5, 4e8), Link(1e-4, 1e7))  # to the host: no time, faster than the computation, slower, far too slow
LEVELS = ((), (Level("box", 8, Link(1e-5, 1e9)),), (Level("box", 8, Link(1e-4, 1e8)),))


# -- the price of parked values ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What the choice of a plan begins with."""

    graph: Graph
    finish: Any


class _Enough(Exception):
    pass


@cache
def asked(name: str, tp: int) -> Asked:
    """Of sizes that leave slices with padding, if there are several ranks."""
    torch.manual_seed(0)
    if tp == 1:
        model = MODELS[name]().train()
        batch = batch_for(model)
    else:
        model = GPT(vocab=61, layers=2, width=36, heads=4, seq_len=15, dropout=0.1)
        batch = {key: torch.zeros(3, 15, dtype=torch.int64) for key in ("ids", "labels")}
    found = []

    def choose(graph, persistent, options, device, rest, limit, finish):
        found.append(Asked(graph, finish))
        raise _Enough

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "choose", choose)
        with pytest.raises(_Enough):
            ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters()), mesh=ph.Mesh(tp=tp), rank=0)
    return found[0]


@pytest.mark.parametrize("name, tp, shard, host", [(name, 1, False, True) for name in MODELS] + [("gpt", 2, True, False), ("gpt", 4, True, True)])
def test_a_price_is_what_the_parked_graph_takes(name, tp, shard, host):
    """Any values of any order, at any pace: of the arena the lower bound of its layout, of what is adopted and of the host the bytes, and the seconds
    of the timeline. Only of slices it may count one too many, between two nodes or for a slow gather."""
    draw = random.Random(f"{name} {tp}")
    given, persistent = asked(name, tp), asked(name, tp).finish.counted
    options = given.finish.options
    seen = 0
    for _ in range(6):
        device = replace(CPU, host_link=draw.choice(LINKS), levels=draw.choice(LEVELS))
        graph = given.graph
        if draw.random() < 0.5:
            facts = facts_of(graph, persistent.places(), [1.0] * len(graph.nodes))
            graph = replay(graph, order_of(facts, {i: draw.choice([0, 0, 1]) for i, n in enumerate(graph.nodes) if n.phase == "forward"}))
        terrain = Terrain(graph, persistent.places(), True, device, options.mesh)
        share = draw.choice([0.3, 0.7, 1.0])
        ways = {s.value.name: terrain.how(s, shard, host) for s in terrain.saved if draw.random() < share}
        residency = Residency(tuple((root, how) for root, how in ways.items() if how is not None), draw.choice([1, 2, 3]))
        seen += len(residency.parked)
        price = terrain.price(residency)
        parked = park(graph, residency, seconds_by_result(graph, device, options.mesh), device, tp, 0)
        planned = plan_graph(parked, persistent, options)
        slices = max((s.waiting_bytes(how, tp) for s in terrain.saved if (how := ways.get(s.value.name)) and how.shard), default=0)
        assert planned.layout.lower_bound <= price.arena_bytes <= planned.layout.lower_bound + 2 * slices
        assert planned.host_bytes <= price.host_bytes <= planned.host_bytes + 2 * slices and price.external_bytes == planned.external_bytes
        assert price.seconds == pytest.approx(timeline(parked, device, options.mesh).seconds, rel=1e-9)
    assert seen > 20


def test_every_saved_value_of_a_conv_net_may_wait_in_the_arena_afterwards():
    """What kernels have adopted comes back to the arena: with everything parked no saved value is adopted in the backward pass."""
    given = asked("conv", 1)
    terrain = Terrain(given.graph, given.finish.counted.places(), True, CPU, given.finish.options.mesh)
    residency = terrain.everywhere(False, True, 2)
    parked = park(given.graph, residency, seconds_by_result(given.graph, CPU, ph.Mesh()), CPU, 1, 0)
    roots = {s.value.name for s in saved_values(given.graph)}
    first = next(index for index, node in enumerate(parked.nodes) if node.op == "packhorse.from_host.default")
    assert all(span.upper <= first for root, span in lifespans(parked).items() if root in roots)


# -- budgets -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", LINKS[2:])
def test_what_is_proposed_for_the_host_is_not_in_the_way(link):
    """Copies one behind another, by hand: each is away by the time that it has to come back, and at the turn where that is asked for."""
    given = asked("gpt", 1)
    device = replace(CPU, host_link=link)
    terrain = Terrain(given.graph, given.finish.counted.places(), True, device, given.finish.options.mesh)
    seconds = {s.value.name: link.seconds(s.value.extent_bytes) for s in terrain.saved}
    taken = {}
    for until in (terrain.turn, float("inf")):
        for lag in (0.0, 0.1, 10.0):
            parked = dict(terrain.everywhere(False, True, 2, lag * terrain.begins[-1], None, until).parked)
            done = 0.0
            for saved in sorted((s for s in terrain.saved if s.value.name in parked), key=lambda s: (s.last, s.value.name)):
                ready = terrain.begins[saved.last + 1]
                assert done <= ready + lag * terrain.begins[-1]
                done = max(done, ready) + seconds[saved.value.name]
                assert done <= until and done + seconds[saved.value.name] < terrain.begins[saved.first]
            taken[until, lag] = len(parked)
    assert len(terrain.saved) > taken[float("inf"), 10.0] > taken[terrain.turn, 10.0] or link is LINKS[3]
    assert all(given.graph.nodes[k].phase == "forward" for k, begin in enumerate(terrain.begins[:-1]) if begin < terrain.turn)


def test_what_is_beaten_in_seconds_and_bytes_is_left_out():
    draw = random.Random(0)
    found = [(Residency((), k), Price(draw.randrange(20), draw.randrange(3), 0, float(draw.randrange(20)))) for k in range(60)]
    left = unbeaten(found)
    prices = dict(found)
    for residency, price in found:
        beaten = any(other.seconds <= price.seconds and other.peak <= price.peak and other != price for other in prices.values())
        assert residency not in left if beaten else any((prices[r].seconds, prices[r].peak) == (price.seconds, price.peak) for r in left)


def small(dropout: float = 0.1) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab=61, layers=2, width=32, heads=4, seq_len=32, dropout=dropout)


def tokens(size: int = 4, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 61, (size, 33), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> str:
    """A device file with a link on which some values hide and all do not."""
    path = tmp_path_factory.mktemp("device") / "slow.toml"
    path.write_text(format_device(replace(CPU, host_link=Link(1e-5, 4e8))))
    return str(path)


def planned(device: str, model=None, batch=None, **options):
    model = model or small()
    batch = tokens() if batch is None else batch
    return model, ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), clip_norm=1.0, device=device, **options)


def ran(model, plan, steps=2, batches=None):
    """(losses and gradients, the step) of a plan; measured bytes are the predicted ones in every step."""
    torch.manual_seed(5)
    step = ph.compile(model, plan)
    found = []
    for batch in batches or [tokens()] * steps:
        found.append(step(batch).clone())
        ledger = step.ledger()
        assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes and not ledger.differences
        assert ledger.measured_host_bytes == ledger.predicted_host_bytes
    return [*found, *step.grads().values(), torch.get_rng_state()], step


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.fixture(scope="module")
def kept(slow):
    """(plan, outcome) of the step that keeps everything."""
    model, plan = planned(slow, recompute="none", residency="keep")
    return plan, ran(model, plan)[0]


@pytest.mark.parametrize("budget", [0.62])
def test_never_slower_than_recomputing_alone_or_copying_alone(budget, slow, kept):
    plan, outcome = kept
    limit = int(plan.peak_bytes * budget)
    model, both = planned(slow, budget=limit, host_budget="60%")
    assert both.peak_bytes <= limit and both.host_bytes <= pool_bytes(plan) * 0.6
    alone = []
    for options in ({"residency": "keep"}, {"recompute": "none", "host_budget": "60%"}):
        try:
            alone.append(planned(slow, budget=limit, **options)[1])
        except UserError:
            continue  # copying alone does not reach so far
    assert alone and all(other.peak_bytes <= limit for other in alone)
    assert both.seconds <= min(other.seconds for other in alone) * (1 + 1e-9)
    assert both.overhead_seconds >= both.least_overhead_seconds >= 0
    assert same(ran(model, both)[0], outcome)


def pool_bytes(plan):
    """Of all that a step that keeps everything saves, each value from a multiple of 64."""
    return sum(-(-s.value.extent_bytes // 64) * 64 for s in saved_values(plan.programs["first"].graph))


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_everything_on_the_host(recompute, slow, kept):
    plan, outcome = kept
    model, offloaded = planned(slow, recompute=recompute, residency="offload", host_budget="2MiB")
    if recompute == "none":
        assert offloaded.host_bytes == pool_bytes(plan)
    assert offloaded.peak_bytes < plan.peak_bytes and 0 < offloaded.host_bytes <= 2**21
    assert same(ran(model, offloaded)[0], outcome)


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_adopted_values_on_the_host(name, slow):
    outcomes = []
    for options in ({"residency": "keep"}, {"residency": "offload", "host_budget": "100%"}):
        torch.manual_seed(0)
        model = MODELS[name]().train()
        batch = batch_for(model)
        plan = planned(slow, model, batch, recompute="none", **options)[1]
        outcomes.append(ran(model, plan, batches=[batch] * 2)[0])
    assert plan.host_bytes and same(*outcomes)


# -- slices ------------------------------------------------------------------------------------------------------------------------------------


def test_as_many_slices_as_a_budget_asks_for(tmp_path):
    """Gathers cost more the more there are. Below what keeping everything takes, slice after slice comes, each budget met by as few bytes as slices
    of one size allow, up to all of them; a step takes longer with each, and is never slower than with all."""
    path = tmp_path / "box.toml"
    path.write_text(format_device(replace(CPU, levels=(Level("box", 2, Link(1e-5, 1e8)),))))

    def plan(**options):
        return planned(str(path), batch=tokens(4), recompute="none", mesh=ph.Mesh(tp=2), rank=0, **options)[1]

    def slices(plan):
        return [node for node in plan.programs["first"].graph.nodes if node.op == OWN_SLICE]

    kept, cut = plan(), plan(residency="shard")
    assert not slices(kept) and cut.peak_bytes < kept.peak_bytes and cut.seconds > kept.seconds
    room = kept.peak_bytes - cut.peak_bytes
    largest = max(node.outputs[0].extent_bytes for node in slices(cut))
    seen = [plan(budget=cut.peak_bytes + room * k // 8) for k in range(9)]
    numbers = [len(slices(one)) for one in seen]
    assert numbers == sorted(numbers, reverse=True) and numbers[-1] == 0 and numbers[0] <= len(slices(cut)) and len(set(numbers)) > 4
    for k, one in enumerate(seen):
        limit = cut.peak_bytes + room * k // 8
        assert limit - largest <= one.peak_bytes <= limit, "a slice less would not fit"
        assert one.seconds <= cut.seconds
    assert [one.seconds for one in seen] == sorted((one.seconds for one in seen), reverse=True)


# -- what is refused ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, told",
    [
        ({"residency": "moon"}, "'moon' is no way.*expected one of auto, keep, shard, offload"),
        ({"residency": None}, "None is no way.*expected one of"),
        ({"residency": "shard"}, "residency='shard'.*tp=1.*use several tp ranks"),
        ({"residency": "offload"}, "residency='offload'.*host_budget is None.*set host_budget"),
        ({"residency": "offload", "host_budget": 0}, r"needs .*bytes\) of the host's memory.*host_budget is 0 B.*raise it"),
        ({"residency": "offload", "host_budget": "10%"}, "residency='offload' needs .*host_budget is .*or leave residency 'auto'"),
        ({"host_budget": "lots"}, "cannot read the host_budget 'lots'; write a number of bytes, 8GiB, or a share"),
        ({"host_budget": -1}, "cannot read the host_budget -1"),
        ({"host_budget": True}, "cannot read the host_budget True"),
        ({"host_budget": 1.5}, "cannot read the host_budget 1.5"),
        ({"host_budget": "101%"}, "cannot read the host_budget '101%'"),
        ({"host_budget": "nan%"}, "cannot read the host_budget 'nan%'"),
        ({"host_budget": "%"}, "cannot read the host_budget '%'"),
    ],
    ids=str,
)
def test_refused_in_one_paragraph(options, told, slow):
    with pytest.raises(UserError, match=told) as refused:
        planned(slow, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("given, wanted", [(None, 0), (0, 0), (7, 7), ("2KiB", 2048), ("30%", 300), (" 30 %", 300), ("0%", 0), ("100%", 1000)])
def test_a_host_budget_in_bytes(given, wanted):
    assert host_budget_bytes(given, 1000) == wanted


# -- programs made later -----------------------------------------------------------------------------------------------------------------------


def test_batches_of_other_sizes_and_evaluation(slow):
    """Each gets a program of its own, whose saved values wait too."""
    batches = [tokens(), tokens(6, 2), tokens()]
    found = []
    for options in ({"residency": "keep"}, {"residency": "offload", "host_budget": "2MiB"}):
        model, plan = planned(slow, recompute="none", **options)
        outcome, step = ran(model, plan, batches=batches)
        found.append([*outcome, torch.tensor(step.evaluate(tokens(3, 4)))])
        wanted = [step.programs.planned[key].host_bytes for key in step.programs.planned if key[0] == "first"]
    assert same(*found)
    assert len(wanted) == 2 and wanted[0] < wanted[1]


def test_a_batch_too_large_for_the_host_is_refused_and_the_step_goes_on(slow):
    model, plan = planned(slow, recompute="none", residency="offload", host_budget="2MiB")
    _, step = ran(model, plan, 1)
    with pytest.raises(UserError, match=r"residency='offload' needs .*host_budget is 2\.000 MiB") as refused:
        step(tokens(40))
    assert "\n" not in str(refused.value)
    step(tokens())


@pytest.mark.parametrize("recompute", ["none", "blocks"])
def test_several_micro_batches(recompute, slow):
    micros = [tokens(2, seed) for seed in range(3)]
    found = []
    for options in ({"residency": "keep"}, {"residency": "offload", "host_budget": "2MiB"}):
        model, plan = planned(slow, batch=micros, recompute=recompute, num_micro_batches=3, **options)
        found.append(ran(model, plan, batches=[micros] * 2)[0])
    assert plan.programs["first"].host_bytes and plan.programs["next"].host_bytes and same(*found)


def test_after_a_failed_step_the_next_one_is_right(slow, kept):
    """An index outside of the vocabulary: the step ends in the middle, with copies under way."""
    model, plan = planned(slow, recompute="none", residency="offload", host_budget="2MiB")
    torch.manual_seed(5)
    step = ph.compile(model, plan)
    wrong = tokens()
    wrong["labels"] = torch.full_like(wrong["labels"], 99)
    state = torch.get_rng_state()
    with pytest.raises(UserError, match="out of bounds"):
        step(wrong)
    torch.set_rng_state(state)
    found = [step(tokens()).clone() for _ in range(2)]
    assert same([*found, *step.grads().values(), torch.get_rng_state()], kept[1])
