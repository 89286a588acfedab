"""The reproduction of Megatron-LM at small sizes: closed forms worked out by hand, counts against the graph, claims that can fail."""

import dataclasses
import math

import pytest

from packhorse.errors import UserError
from packhorse.graph.operators import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM
from packhorse.models.gpt import GPT
from packhorse.models.sizes import Size
from packhorse.reproduce import megatron, megatron_counts, megatron_depth, megatron_ranks, megatron_sizes
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.megatron_job import Ran

pytestmark = pytest.mark.cpu
SMALL = Size(layers=3, width=48, heads=4, vocab=512, seq_len=16)


def test_closed_forms_count_the_parameters_of_a_gpt():
    model = GPT(vocab=512, layers=3, width=48, heads=4, seq_len=16)
    assert megatron_sizes.whole_parameters(SMALL) == sum(p.numel() for p in model.parameters())
    cut = ("qkv.weight", "qkv.bias", "up.weight", "up.bias", "out.weight", "tokens.weight")
    for ranks in (1, 2, 4):
        by_hand = sum(p.numel() // ranks if name.endswith(cut) else p.numel() for name, p in model.named_parameters())
        assert megatron_sizes.rank_parameters(SMALL, ranks) == by_hand


def test_a_rank_of_a_size_has_the_parameters_of_the_closed_form():
    found = megatron_sizes.measure("megatron-2.5b", SMALL, 2)
    assert found.parameters == found.expected
    # fp16 parameters and gradients, fp32 master weights and two states: 16 bytes; and of each of 40 tensors less than a line of padding
    assert 0 <= found.persistent_bytes - 16 * found.parameters < 64 * 5 * 40
    assert found.peak_bytes <= found.keep_bytes


@pytest.fixture(scope="module")
def counted():
    """A shallow GPT at tp 2 in every way, as the command plans it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron_counts, "BLOCKS", 2)
        yield {how.name: megatron_counts.count("GPT", 2, how) for how in (*megatron_counts.WAYS, megatron_counts.BLOCKS_DROPOUT)}


def test_all_reduces_of_a_gpt(counted):
    plain, layers = counted["plain"], megatron_counts.BLOCKS
    assert plain.whole == {(TENSOR_SUM, "forward"): 2 * layers + 1, (TENSOR_SUM, "backward"): 2 * layers + 1}
    assert plain.others == (2 * 3 * 4 * 256,)  # of the loss: two ranks, three numbers a token
    hidden, rows = 4 * 256 * 128 * 4, 3 * 4 * 256 * 4  # bytes
    # each all-reduce sends 2 (N - 1) / N = 1 time the tensor; one number of the norm; 24 bytes before the step
    assert plain.sent == (4 * layers + 2) * hidden + rows + 4 + 24 == megatron_counts.expected_bytes(plain)


def test_sequences_and_blocks_of_a_gpt(counted):
    layers, sequence = megatron_counts.BLOCKS, counted["sequence parallel"]
    scattered = 2 * layers + 1
    assert {key: times for key, times in sequence.whole.items() if key[0] == TENSOR_SCATTER} == {
        (TENSOR_SCATTER, "forward"): scattered,
        (TENSOR_SCATTER, "backward"): scattered,
    }
    assert sequence.of(TENSOR_GATHER, "forward") == scattered and sequence.of(TENSOR_SUM, "forward") == sequence.of(TENSOR_SUM, "backward") == 0
    width = 128  # norms, the biases of what is cut by rows, positions
    assert sequence.replicated == layers * 6 * width + 2 * width + 256 * width
    assert sequence.sent == megatron_counts.expected_bytes(sequence)
    assert counted["blocks again"].of(TENSOR_SUM, "recompute") <= 2 * layers and counted["blocks again"].again > 0
    assert counted["blocks again, dropout"].of(TENSOR_SUM, "recompute") <= 2 * layers


def test_claims_of_counts_fail_where_a_count_is_wrong(counted):
    right = list(counted.values())
    assert all(claim.holds for claim in megatron_counts.claims(right))
    for change in (
        {"whole": {(TENSOR_SUM, "forward"): 18, (TENSOR_SUM, "backward"): 17}},
        {"others": (4 * 256 * 2048,)},
        {"sent": right[0].sent + 4},
    ):
        wrong = [dataclasses.replace(right[0], **change), *right[1:]]
        assert not all(claim.holds for claim in megatron_counts.claims(wrong)), change


def ran(losses, start="a", wall=1.0, cpu=(1.0,), flops=8):
    return Ran(list(losses), start, True, 100, flops, wall, list(cpu), 0)


def test_claims_of_curves():
    alone, other = megatron_ranks.Job(1, 1, ran([2.0, 1.0])), megatron_ranks.Job(1, 2, ran([2.0, 1.0 + 1e-7]))
    near, far = megatron_ranks.Job(2, 1, ran([2.0, 1.0 + 5e-7])), megatron_ranks.Job(2, 1, ran([2.0, 1.0 + 1e-5], start="b"))
    assert all(claim.holds for claim in megatron_ranks.claims_of_curves([alone, other, near]))
    assert [claim.holds for claim in megatron_ranks.claims_of_curves([alone, other, far])] == [False, False, True]


def test_efficiency():
    """Twice the flops in all, by two ranks, in 1.25 times the time and 3 CPU seconds for 1."""
    alone, pair = megatron_ranks.Job(1, 1, ran([])), megatron_ranks.Job(2, 1, ran([], wall=1.25, cpu=(1.5, 1.5)))
    assert megatron_ranks.weak_efficiency(pair, alone) == pytest.approx((0.8, 2 / 3))


def test_the_recipe_of_depth():
    width, depth = megatron_depth.WIDTH, 4
    std = 0.02 * math.sqrt(1024 / width)
    for recipe, smaller in (("scaled", math.sqrt(2 * depth)), ("unscaled", 1.0)):
        model = megatron_depth.make(recipe, True, 0, depth)
        assert model.blocks[0].attention.qkv.weight.std().item() == pytest.approx(std, rel=0.05)
        for into in (model.blocks[3].attention.out, model.blocks[3].feed_forward[2]):
            assert into.weight.std().item() == pytest.approx(std / smaller, rel=0.05)
    rates = [megatron_depth.learning_rate(step, 1000) for step in range(1000)]
    peak = 1e-4 * 1024 / width
    assert max(rates) == rates[4] == pytest.approx(peak) and rates[0] == pytest.approx(peak / 5)  # 0.5 % of the steps
    assert rates[4:] == sorted(rates[4:], reverse=True) and 0 < rates[-1] < peak / 900


def trained(recipe, pre_norm, seed, sixth, rest):
    """Losses of its tenths: five of 3, the sixth, four others."""
    return megatron_depth.Trained(recipe, pre_norm, seed, (1.0, 2.0), (3.0,) * 10 + (sixth,) * 2 + (rest,) * 8)


def test_the_gap_of_depth_is_of_medians_and_has_to_stay():
    post = [trained("scaled", False, seed, loss, loss) for seed, loss in enumerate((1.9, 2.0, 9.0))]
    for sixth, rest, holds in ((1.4, 1.4, True), (1.4, 1.6, False), (1.6, 1.4, False)):
        pre = [trained("scaled", True, seed, sixth, rest) for seed in range(3)]
        assert [claim.holds for claim in megatron_depth.claims([*pre, *post])] == [None, holds, True]


def test_training_takes_steps():
    corpus = megatron_depth.load_corpus("stdlib")
    run = megatron_depth.train(corpus, "scaled", True, 0, 10, depth=2)
    assert len(run.losses) == 10 and len(run.norms) == 2 and run.losses[-1] < run.losses[0]


def test_several_runs_at_once_are_those_of_one_after_another():
    asked = (10, (0,), ("unscaled",))
    found = list(megatron_depth.runs(*asked, depth=2))
    assert [(run.recipe, run.pre_norm, run.seed) for run in found] == [("unscaled", True, 0), ("unscaled", False, 0)]
    assert list(megatron_depth.runs(*asked, jobs=2, depth=2)) == found


def test_a_page_without_markers_and_too_few_steps_are_refused_before_the_work(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing\n")
    for words, said in ((["--write", str(page)], "has no lines"), (["--steps", "3"], "10 or more steps"), (["--jobs", "0"], "seeds and jobs")):
        with pytest.raises(UserError, match=said):
            megatron.run(words, as_json=False)


def test_a_part_is_written_between_its_own_markers(tmp_path, capsys, monkeypatch):
    part = megatron.Found([Claim("what", "paper", "ours", False)], "the table", [1], {"figure.svg": "<svg/>"})
    monkeypatch.setitem(megatron.PARTS, "depth", lambda asked: part)
    page = tmp_path / "page.md"
    page.write_text("\n".join(["before", *megatron.markers("depth"), "after"]))
    assert megatron.run(["--what", "depth", "--write", str(page)], as_json=True) == 1
    assert "the table" in page.read_text() and page.read_text().endswith("after") and (tmp_path / "figure.svg").read_text() == "<svg/>"
    assert '"figures": [1]' in capsys.readouterr().out
