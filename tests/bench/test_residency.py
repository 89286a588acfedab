import json
from itertools import product

import pytest
import torch
from torch import nn

import packhorse
from packhorse.bench import residency
from packhorse.bench.jobs import run_job
from packhorse.bench.residency import balanced_rate, interval, is_kept, is_never_slower_predicted, is_slower, measured_gains, predicted_gain, render
from packhorse.bench.residency_job import JOINT, WAYS, Cell, Ran, batch_of, budget_of
from packhorse.cli.benches import NAMES
from packhorse.device.device import Cost, Device, format_device, load_device
from packhorse.device.links import Link
from packhorse.errors import UserError

pytestmark = pytest.mark.cpu
MIB = 2**20


def a_cell(joint=(0.9, 1.0), recompute=(1.0, 1.1), blocks=(1.2, 1.3), **joint_fields):
    """Seconds of each way: predicted, measured in 9 rounds with a little noise."""

    def ran(way, pair, **fields):
        noise = (0.0, 0.01, -0.01, 0.02, -0.02, 0.03, -0.03, 0.0, 0.0)
        given = {
            "peak_bytes": 90 * MIB,
            "exact": True,
            "equal": True,
            "seconds": [pair[1] * (1 + n) for n in noise],
            "cpu_seconds": [2 * pair[0]] * 9,
        }
        return Ran(way, True, pair[0], **given | fields)

    names = list(WAYS)
    rans = [ran(names[0], recompute), Ran(names[1], False), ran(names[2], blocks), ran(JOINT, joint, **joint_fields)]
    return Cell("GPT", 2, 0.25, 100 * MIB, 200 * MIB, 0.8, 60 * MIB, rans)


def test_balanced_rate_by_hand():
    """Saved is what relu gives, 16 x 7 floats; products are 16 x 3 x 7 and 16 x 7 x 2 multiplications and additions."""
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 2))
    plan = packhorse.plan(net, torch.ones(16, 3), optimizer=torch.optim.SGD(net.parameters()), loss=lambda out, _: out.sum(), recompute="none")
    device = Device("hand", "", rows={"aten.addmm.default": Cost(s_per_flop=1e-3)}, other=Cost(fixed_s=1.0))
    assert balanced_rate(plan.programs["first"].graph, device) == pytest.approx(16 * 7 * 4 / (2 * (16 * 3 * 7 + 16 * 7 * 2) * 1e-3))


def test_budgets_lie_between_the_least_and_everything():
    assert [budget_of(200, 100, room) for room in (1, 1 / 2, 1 / 4)] == [200, 150, 125]
    assert residency.ROOMS == (1 / 2, 1 / 4, 1 / 8, 1 / 16) and len(residency.ROOMS) * len(residency.RANKS) * len(residency.WORKLOADS) == 24


@pytest.mark.parametrize("n", (3, 5, 6, 8, 9, 11))
def test_interval_holds_the_median(n):
    """Every way in which n draws can lie below or above a median, all as likely: it lies outside in at most 5 %, and the next narrower one in more.
    Fewer than 6 draws cannot be so sure: all of their range."""

    def outside(k):
        return sum(sum(flips) <= k or sum(flips) >= n - k for flips in product((0, 1), repeat=n)) / 2**n

    low, high = interval(list(range(n))[::-1])
    assert high == n - 1 - low
    assert outside(low) <= 0.05 or low == 0
    assert outside(low + 1) > 0.05


def test_gains_are_over_the_best_of_the_others():
    cell = a_cell()
    assert predicted_gain(cell) == pytest.approx(1.0 / 0.9)
    assert measured_gains(cell) == pytest.approx([1.1] * 9)
    assert predicted_gain(a_cell(recompute=(1.5, 1.1))) == pytest.approx(1.2 / 0.9)
    assert measured_gains(a_cell(recompute=(1.0, 1.5))) == pytest.approx([1.3] * 9)


def test_slower_is_beyond_chance():
    assert not is_slower(a_cell()) and is_slower(a_cell(joint=(0.9, 1.2)))
    assert is_never_slower_predicted(a_cell(joint=(1.0, 1.0))) and not is_never_slower_predicted(a_cell(joint=(1.001, 1.0)))
    noisy = a_cell(joint=(0.9, 1.2), seconds=[1.2, 1.0, 1.2, 1.0, 1.2, 1.0, 1.2, 1.2, 1.2])
    assert not is_slower(noisy)
    assert not is_slower(a_cell(joint=(1.0, 1.2), same_as="recompute only"))


@pytest.mark.parametrize("wrong", ({"exact": False}, {"equal": False}, {"peak_bytes": 101 * MIB}))
def test_a_plan_that_breaks_its_word_is_seen(wrong):
    assert is_kept(a_cell()) and not is_kept(a_cell(**wrong))
    text = render([a_cell(**wrong)], {})
    assert "0 of 1 cells: within budget" in text and "(not as promised)" in text


def test_render():
    text = render([a_cell(), a_cell(joint=(1.01, 1.2))], {"GPT": Device("d", "", host_link=Link(0.0, 250e6))})
    assert "GPT 250 MB/s" in text and "2 of 2 cells: within budget" in text
    assert "never slower than the best of the others in 1 of 2 cells, and at least 10 % faster in 1" in text
    assert "it is slower in 1 of 2 cells beyond chance, and at least 10 % faster (median) in 1" in text
    row = text.splitlines()[-2]
    assert row.startswith(
        "| GPT | 2 | 1/4 | 100.0 | 200.0, 0.800 | 1.000 / 1.100 | does not fit | 1.200 / 1.300 | 0.900 / 1.000 | 0.0 | 1.111 | 1.10 ("
    )


def test_wrong_words_are_refused(tmp_path):
    assert "residency" in NAMES
    for words in (["ResNet"], ["--rounds", "0"], ["--rooms", "1.5"]):
        with pytest.raises(UserError, match="bench residency"):
            residency.run(words, as_json=True)


def test_batches_differ_by_rank_and_are_the_same_each_time():
    one, again, other = (batch_of("Llama", 2, rank) for rank in (0, 0, 1))
    assert torch.equal(one["input_ids"], again["input_ids"]) and not torch.equal(one["input_ids"], other["input_ids"])


def test_a_cell_for_real(tmp_path):
    """On one rank; a link of 100 MB/s."""
    file = tmp_path / "slow.toml"
    device = load_device()
    file.write_text(format_device(Device("slow", "", device.rows, device.other, host_link=Link(1e-5, 1e8))))
    asked = {"model": "GPT", "layers": 1, "samples": 1, "device": str(file), "rooms": [0.5], "rounds": 1}
    found = run_job(residency.JOB, asked, 1, seconds=300)
    cell = Cell(**found[0] | {"rans": [Ran(**ran) for ran in found[0]["rans"]]})
    assert is_kept(cell) and is_never_slower_predicted(cell)
    assert [ran.way for ran in cell.rans] == list(WAYS) and cell.rans[0].fits
    assert cell.least_bytes < cell.budget_bytes < cell.everything_bytes
    assert json.dumps(found)
