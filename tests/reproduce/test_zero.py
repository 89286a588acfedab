"""The reproduction of ZeRO at small sizes: model states by hand, what an allocator is asked for, claims that can fail."""

import dataclasses
import json
from collections import Counter

import pytest
import torch

import packhorse
from packhorse.errors import UserError
from packhorse.memory.caching import simulate
from packhorse.models.gpt import gpt
from packhorse.models.sizes import Size
from packhorse.reproduce import zero, zero_fragmentation, zero_sizes, zero_steps, zero_storage, zero_table1
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.zero_requests import requests_of
from packhorse.search.search import Priced
from packhorse.search.strategy import Needs, Strategy

pytestmark = pytest.mark.cpu
SMALL = Size(layers=3, width=64, heads=16, vocab=512, seq_len=16)


@pytest.fixture(scope="module")
def small():
    return zero_storage.prepared(SMALL)


def test_states_by_hand(small):
    """A block has 12 h^2 + 13 h = 49,984 parameters in 12 tensors of multiples of 32; outside of them are 512 h, 16 h and 2 h."""
    outside, tensors = (512 + 16 + 2) * 64, 3 * 12 + 4
    assert small.parameters == 3 * 49_984 + outside
    assert zero_storage.state_bytes(small, 1, 0) == 16 * small.parameters + 192  # step counts: 40 of 4 bytes, in lines of 64
    # over 4 ranks a block is padded to a multiple of 128 elements; step counts take a line for each block, for tokens, positions and the last norm
    padded, counts = 3 * 50_048 + outside, 6 * 64
    assert tensors * 4 == 160 and padded % 128 == 0
    for stage, of_all, of_share in ((0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)):
        assert zero_storage.state_bytes(small, 4, stage) == of_all * padded + of_share * padded // 4 + counts, stage


def test_storage_and_count_agree_on_odd_sizes():
    given = zero_storage.prepared(Size(layers=2, width=36, heads=4, vocab=101, seq_len=7))
    tensors = [(name, p.numel()) for name, p in given.model.named_parameters()]
    for dp in (1, 3, 16):
        for stage in range(4):
            assert zero_storage.state_bytes(given, dp, stage) == zero_storage.counted_bytes(tensors, dp, stage)


def test_states_are_those_of_a_plan(small):
    with torch.device("meta"):
        model, ids = gpt(SMALL).train(), torch.zeros(2, 16, dtype=torch.long)
    plan = packhorse.plan(
        model,
        {"ids": ids, "labels": ids},
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
        precision="fp16",
        mesh=packhorse.Mesh(dp=2, tp=2),
        rank=0,
        zero_stage=2,
    )
    planned = sum(run.num_bytes for run in plan.persistent.runs if run.kind not in ("metrics", "constants", "buffers"))
    assert zero_storage.state_bytes(small, 2, 2, tp=2) == planned


def cell(printed, gigabytes):
    return zero_table1.Cell("7.5B", 10**9, 1, 1, printed, 16 * 10**9, 16 * 10**9, gigabytes)


def test_cells_may_be_rounded_or_cut_off():
    for printed, gigabytes in (("41.3", 41.25), ("513", 513.5), ("514", 513.5001), ("0.12", 0.1172), ("32", 32.00001)):
        assert cell(printed, gigabytes).is_as_printed
    for printed, gigabytes in (("41.3", 41.24), ("513", 514.0), ("513", 512.4), ("0.12", 0.13), ("1.88", 1.89)):
        assert not cell(printed, gigabytes).is_as_printed


def table_by_formula():
    """The table as the formula has it, at the nominal sizes."""
    for column in zero_table1.TABLE:
        psi = column.nominal
        for stage, printed in column.printed.items():
            for dp, text in zip(zero_table1.DEGREES, printed):
                all_of, share = {1: (4, 12), 2: (2, 14), 3: (0, 16)}[stage]
                num_bytes = all_of * psi + share * psi // dp
                yield zero_table1.Cell(column.name, psi, dp, stage, text, num_bytes, num_bytes, num_bytes / 1e9)


def test_claims_of_table_1():
    right = list(table_by_formula())
    assert len(right) == 54 and all(claim.holds for claim in zero_table1.claims(right))
    for change in ({"gigabytes": right[0].gigabytes * 1.02}, {"num_bytes": right[0].num_bytes + 64}, {"gigabytes": 30.0}):
        wrong = [dataclasses.replace(right[0], **change), *right[1:]]
        assert not all(claim.holds for claim in zero_table1.claims(wrong)), change
    assert "| 1024 | 30.1 / 30.0879 |" in zero_table1.table(right)


def test_cells_of_a_small_model_have_the_formula_and_padding(small):
    column = dataclasses.replace(zero_table1.TABLE[0], nominal=7_500_000_000, size=SMALL)
    found = list(zero_table1.cells(column, small))
    assert len(found) == 18 and all(one.num_bytes == one.counted for one in found)
    first = found[0]
    assert first.gigabytes == pytest.approx(120 * (1 + 192 / (16 * small.parameters)))


def test_largest_models():
    for parameters, printed, holds in (
        (2.01e9, "2B", True),
        (2.6e9, "2B", False),
        (122.27e9, "121.6B", True),
        (125e9, "121.6B", False),
        (512e9, "0.5T", True),
        (560e9, "0.5T", False),
    ):
        assert zero_sizes.Largest(1, 0, printed, 1, parameters).is_as_printed is holds


def test_largest_models_follow_from_bytes_a_parameter(small):
    found = {(one.tp, one.stage): one for one in zero_sizes.largest(small) if one.tp <= 4}
    for tp in (1, 2, 4):
        assert found[tp, 3].state_bytes == zero_storage.state_bytes(small, 64, 3, tp)
    assert found[1, 0].parameters == pytest.approx(2e9, rel=0.05)  # 32 GB at 16 bytes each, and padding for 64 ranks


def test_what_fits_is_a_matter_of_states():
    fit, other = (zero_sizes.Fit("zero-100b", 25, 16, stage, stage == 2) for stage in (2, 0))
    table2 = [zero_sizes.Largest(1, stage, row, 1, size) for stage, (row, size) in enumerate(zip(zero_sizes.TABLE[1], (2e9, 7.64e9, 14.4e9, 128e9)))]
    right = [zero_sizes.Fitted(fit, 101 * 10**9, 16 * 10**9), zero_sizes.Fitted(other, 101 * 10**9, 101 * 10**9)]
    assert all(claim.holds for claim in zero_sizes.claims(table2, right))
    wrong = [dataclasses.replace(right[0], state_bytes=35 * 10**9), dataclasses.replace(right[1], state_bytes=34 * 10**9)]
    assert [claim.holds for claim in zero_sizes.claims(table2, wrong)][-2:] == [False, False]


def priced(way, samples, seconds, why=""):
    return Priced(Strategy(8, 16, 2, samples, "blocks", way), Needs(14e9, 8e9, 1e9, 0.0, 0.0, seconds, 1e15, 0.0), why)


def stepped(name, fits, seconds):
    """A case of figure 8 of which these ways fit, with a step of so many seconds for 8 samples."""
    case = next(case for case in zero_steps.CASES if case.name == name)
    each = {way: priced(way, 8, seconds[way], "" if way in fits else "takes too much") for way in zero_steps.WORDS}
    return zero_steps.Steps(case, each, each)


def test_claims_of_figure_8():
    paper = {"keep": 12.0, "shard": 10.0, "offload": 11.0}  # seconds: P_a is fastest, the host costs time
    right = [stepped("60B", ("keep", "shard", "offload"), paper), stepped("170B", ("offload",), paper), stepped("1T", ("shard",), paper)]
    assert [one.best for one in right] == ["shard", "offload", "shard"]
    assert len(claims := list(zero_steps.claims(right))) == 5 and all(claim.holds for claim in claims)
    text = zero_steps.table(right)
    assert "| 60B | 128 | 2, 4, 8, 16, 32 | P_a | 8 | 23.00 | 14.00 | 0.00 | 10.00 | 6.40 | 100.0 |" in text and "P_a | 8 does not fit" in text
    for wrong in (
        [stepped("60B", ("shard", "offload"), paper | {"offload": 9.0})],  # the host is fastest
        [stepped("60B", ("keep", "shard", "offload"), paper | {"keep": 9.0})],
        [stepped("170B", ("shard", "offload"), paper)],  # P_a alone is enough
        [stepped("170B", (), paper)],
        [stepped("1T", (), paper)],
    ):
        assert not all(claim.holds for claim in zero_steps.claims(wrong)), wrong


def test_a_step_is_that_of_a_search():
    """A small GPT on the paper's device: everything fits, and nothing that is saved leaves in vain."""
    case = zero_steps.Case("small", SMALL, 2, 2, 0, (2,), "keep")
    found = zero_steps.found_of(case)
    assert found.best == "keep" and not any(one.why for one in found.each.values())
    assert {one.strategy.samples for one in found.each.values()} == {2} and found.each["keep"].strategy.mesh == packhorse.Mesh(dp=1, tp=2)
    kept, cut, away = (found.each[way].needs for way in zero_steps.WORDS)
    assert kept.saved_bytes > cut.saved_bytes and away.host > 0 == kept.host == cut.host


CASE = zero_fragmentation.Case("small", SMALL, (16,) * 2, "blocks")


@pytest.fixture(scope="module")
def plans():
    return zero_fragmentation.plans_of(CASE)


def peak_of(requests):
    alive = peak = 0
    sizes = {}
    for request in requests:
        if request.frees:
            alive -= sizes.pop(request.name)
        else:
            sizes[request.name] = request.num_bytes
            alive += request.num_bytes
            peak = max(peak, alive)
    return peak, sizes


def test_an_allocator_is_asked_for_what_the_placement_keeps(plans):
    """The most bytes alive are those of the tensors that persist and of the storages of one instant; what persists is what is left."""
    plan = plans[0]
    kept = sum(slot.value.extent_bytes for run in plan.persistent.runs for slot in run.slots)
    most = 0
    for program in plan.programs.values():
        for time in range(len(program.graph.nodes) + 1):
            most = max(most, sum(s.size for s in program.placement.storages if s.lower <= time < s.upper))
    requests = requests_of(plans, late=False)
    peak, left = peak_of(requests)
    assert peak == kept + most <= plan.peak_bytes
    assert sum(left.values()) == kept
    assert [request.time for request in requests] == list(range(len(requests)))
    storages = sum(len(p.placement.storages) for p in plan.programs.values())
    assert Counter(request.frees for request in requests) == {True: 2 * storages, False: 2 * storages + len(left)}


def test_gradients_and_states_as_a_loop_makes_them(plans):
    requests = requests_of(plans, late=True)
    _, left = peak_of(requests)
    runs = plans[0].persistent.runs
    names = {
        kind: {f"{run.name} {slot.target}" for run in runs if run.kind == kind for slot in run.slots} for kind in ("gradients", "optimizer states")
    }
    made = Counter(request.name for request in requests if not request.frees)
    assert {made[name] for name in names["gradients"]} == {2} and not names["gradients"] & left.keys()
    assert {made[name] for name in names["optimizer states"]} == {1} and names["optimizer states"] <= left.keys()
    at = {request.name: request.time for request in reversed(requests) if not request.frees}  # the first time
    (run,) = (run.name for run in runs if run.kind == "gradients")
    states = [at[name] for name in names["optimizer states"]]
    assert at[f"{run} norm.weight"] < at[f"{run} blocks.2.feed_forward.out.bias"] < at[f"{run} blocks.0.attention.qkv.weight"] < min(states)


def test_served(plans):
    peak = plans[0].peak_bytes
    for late in zero_fragmentation.WAYS:
        served = zero_fragmentation.serve(plans, late, peak)
        requests = requests_of(plans, late)
        assert simulate(requests, served.sufficient).failure is None and served.below is not None
        assert served.peak_allocated >= peak_of(requests)[0] and served.sufficient <= served.peak_reserved
        assert (served.at_peak is None) == (simulate(requests, peak).failure is None)


def test_claims_of_fragmentation(plans, monkeypatch):
    monkeypatch.setattr(zero_fragmentation, "plans_of", lambda case: plans)
    found = zero_fragmentation.measure(CASE)
    assert found.peak_bytes == plans[0].peak_bytes and found.bound_bytes <= found.peak_bytes
    claims = {claim.what: claim for claim in zero_fragmentation.claims([found])}
    assert claims["small: the plan's peak"].holds
    higher = dataclasses.replace(found, bound_bytes=found.bound_bytes // 2)
    assert next(iter(zero_fragmentation.claims([higher]))).holds is False
    through = dataclasses.replace(found, served=tuple(dataclasses.replace(s, at_peak=None) for s in found.served))
    assert [claim.holds for claim in zero_fragmentation.claims([through])][1] is False
    assert zero_fragmentation.table([found]).count("| small |") == 2 + 4


def test_a_page_without_markers_is_refused_before_the_work(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    with pytest.raises(UserError, match="has no lines"):
        zero.run(["--write", str(page)], as_json=False)


def test_a_part_is_written_between_its_own_markers(tmp_path, capsys, monkeypatch):
    part = zero.Found([Claim("what", "paper", "ours", False)], "the table", [1])
    monkeypatch.setattr(zero, "PARTS", {"sizes": lambda: part, "table1": lambda: dataclasses.replace(part, claims=[])})
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", *zero.markers("table1"), *zero.markers("sizes"), "after"]))
    assert zero.run(["--what", "sizes", "--write", str(page)], as_json=True) == 1
    assert page.read_text().count("the table") == 1 and page.read_text().endswith("after")
    assert json.loads(capsys.readouterr().out)["sizes"]["figures"] == [1]
    assert zero.run(["--what", "table1"], as_json=False) == 0
