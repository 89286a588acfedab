"""A search prices strategies by a few blocks; here the whole small model is planned beside it, and has to agree."""

from dataclasses import replace

import pytest
import torch

import packhorse as ph
from packhorse.capture.flat_storage import Widths
from packhorse.device.device import load_device
from packhorse.errors import BudgetError, UserError
from packhorse.graph.stamp import same_but_for_names
from packhorse.models.gpt import GPT
from packhorse.models.lstm import LSTM
from packhorse.search.grow import grown
from packhorse.search.search import DEPTHS, Within, confirm, doublings, search
from packhorse.search.short import Short
from packhorse.search.strategy import Strategy

pytestmark = pytest.mark.cpu
BLOCKS, SAMPLES, USABLE = 9, 8, 3_650_000
# enough for some strategies of 4 ranks and not for others
DEVICE = replace(load_device("v100-dgx2"), memory_bytes=2_000_000, usable=1.0, host_memory_bytes=10_000_000)


def short(model=None, device=DEVICE):
    with torch.device("meta"):
        model = model or GPT(vocab=96, layers=BLOCKS, width=64, heads=4, seq_len=32)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.zeros(SAMPLES, 32, dtype=torch.int64)
    batch = {"ids": ids, "labels": ids}
    return Short(model, batch, optimizer, None, Widths(None, None, scaled=False), 1.0, device, host_budget=10_000_000)


@pytest.fixture(scope="module")
def of_nine():
    return short()


STRATEGIES = [
    Strategy(1, 1, 0, SAMPLES, "none", "keep"),
    Strategy(4, 1, 3, SAMPLES, "blocks", "keep"),
    Strategy(2, 2, 2, SAMPLES, "blocks", "shard"),
    Strategy(2, 2, 1, SAMPLES, "blocks", "offload"),
]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.dp} {s.tp} {s.stage} {s.recompute} {s.residency}")
def test_the_whole_model_needs_what_was_grown(of_nine, strategy):
    foretold = grown({depth: of_nine.needs(strategy, depth, sketch=True) for depth in DEPTHS}, BLOCKS)
    truth = of_nine.needs(strategy, BLOCKS, sketch=True)
    for name in ("persistent", "host", "sent", "flops"):
        assert getattr(foretold, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    assert 0.999 * truth.peak <= foretold.peak <= 1.1 * truth.peak
    assert foretold.seconds == pytest.approx(truth.seconds, rel=0.05)


def test_batches_are_stamped_out_as_they_are_captured():
    """Three captures foretell a fourth, value by value."""
    learned, plain = short(), short()
    learned.learn([2], [1, 2, 3, 4, 8])
    assert set(learned.captured) == {(2, 1), (2, 2), (2, 3), (2, 4)} and learned.learned
    assert same_but_for_names(learned.capture(2, 8).graph, plain.capture(2, 8).graph, {}, {})


def test_a_sketch_is_the_plan_without_offsets(of_nine):
    laid_out, sketched = (of_nine.plan(STRATEGIES[2], 3, sketch) for sketch in (False, True))
    assert sketched.persistent_bytes == laid_out.persistent_bytes and sketched.comm_bytes == laid_out.comm_bytes
    assert sketched.seconds == laid_out.seconds
    assert 0.9 * laid_out.arena_bytes <= sketched.arena_bytes <= laid_out.arena_bytes


def test_what_is_found_keeps_to_the_memory(of_nine):
    """Planned whole, with offsets."""
    answer = search(of_nine, Within(4, ((1, 1), (SAMPLES, 1)), USABLE, tp=2, stage=2, processes=2))
    assert answer.best is not None and answer.nearest
    plan = of_nine.plan(answer.best.strategy, BLOCKS)
    assert plan.peak_bytes <= USABLE * 1.001 and plan.options.mesh.world_size == 4
    assert answer.best.samples_per_s >= max(one.samples_per_s for one in answer.nearest)


def test_degrees_that_do_not_divide_heads_are_named(of_nine):
    failures = search(of_nine, Within(8, doublings(1), 1_000_000, tp=8, processes=1)).failures
    assert failures and all("heads" in one.why or "4" in one.why for one in failures)


def test_nothing_fits(of_nine):
    answer = search(of_nine, Within(2, doublings(1), 1000, processes=1))
    assert answer.best is None and len(answer.failures) == 2 * 4 - 4 + 1 and all("model states alone take" in f.why for f in answer.failures)
    assert confirm(of_nine, STRATEGIES[0], 1000).why.startswith("takes")


def test_a_model_without_equal_blocks_is_refused():
    with torch.device("meta"):
        model = LSTM(vocab=8, layers=1, width=8)
    with pytest.raises(UserError, match="0 runs of equal blocks"):
        short(model)


def test_a_topology_that_does_not_hold_the_ranks(of_nine):
    with pytest.raises(UserError, match="ranks"):
        search(of_nine, Within(8192, doublings(1), 1_000_000, processes=1))


def test_auto_is_the_fastest_that_fits(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = GPT(vocab=96, layers=4, width=32, heads=2, seq_len=16)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = {"ids": torch.zeros(4, 16, dtype=torch.int64), "labels": torch.zeros(4, 16, dtype=torch.int64)}
    asked = {"optimizer": optimizer, "mesh": "auto", "zero_stage": "auto", "num_micro_batches": "auto", "rank": 0}
    plan = ph.plan(model, batch, budget="2MiB", **asked)
    assert plan.options.mesh.world_size == 2 and plan.peak_bytes <= 2 << 20
    with pytest.raises(BudgetError, match="no strategy on 2 ranks fits 100000 bytes"):
        ph.plan(model, batch, budget=100_000, **asked)
    with pytest.raises(UserError, match="does not say how much memory"):
        ph.plan(model, batch, **asked)
    with pytest.raises(UserError, match="a share of"):
        ph.plan(model, batch, budget="40%", **asked)
