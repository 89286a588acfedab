import json
from dataclasses import asdict, replace

import pytest
import torch

from packhorse.bench import equality
from packhorse.bench.equality import is_equal, outcomes_of, render, unlike
from packhorse.bench.equality_cases import FACTORS, MESH_FACTORS, Case, every_case, every_mesh_case, micro_batches, start, whole_batch
from packhorse.bench.equality_job import Outcome, apart, value_of
from packhorse.bench.equality_models import CUT_WORKLOADS, EVERY_WORKLOAD, WORDY, WORKLOADS
from packhorse.cli.benches import NAMES, run_bench
from packhorse.errors import UserError

pytestmark = pytest.mark.cpu
CASE = Case("GPT", 2, 0, 1, True, False)
GOOD = Outcome(CASE, 1e-13, 1e-13, 1e-13, 1e-13, "a", True, alike=True)


def test_the_full_matrix():
    assert len(every_case()) == 5 * 4 * 4 * 2 * 2 * 2 == len(set(every_case()))
    assert set(FACTORS["model"]) == set(WORKLOADS)


def test_the_full_matrix_over_tp():
    """Stages where there are dp ranks, split sequences where there are tp ranks; micro-batches and clipping alternate."""
    cases = [case for case in every_mesh_case() if case.model != WORDY]
    ways = {(c.model, c.tp, c.dp, c.stage, c.recompute, c.sequence) for c in cases}
    assert len(ways) == len(cases) == 6 * (2 * (1 + 4) + 2 * 3 * (1 + 4))
    assert {c.model for c in cases} == set(MESH_FACTORS["model"]) == set(CUT_WORKLOADS)
    for fields in ("model", "tp", "dp", "stage", "recompute", "sequence"):
        for value in {getattr(c, fields) for c in cases}:
            those = [c for c in cases if getattr(c, fields) == value]
            assert {(c.micros, c.clip) for c in those} == {(1, False), (1, True), (2, False), (2, True)}, (fields, value)
    assert sorted((c.model, c.tp, c.dp, c.steps) for c in cases if c.steps > 3) == [("GPT, 4 heads", 2, 1, 10), ("Llama, 4 heads, untied", 2, 2, 10)]
    assert [case.tp for case in every_mesh_case() if case.model == WORDY] == [1, 2, 4]


@pytest.mark.parametrize("model", EVERY_WORKLOAD)
def test_the_loss_of_the_whole_batch_is_the_mean_of_its_parts(model):
    """As it is only where parts have as many samples and labels as each other."""
    case = Case(model, 3, 0, 2, False, False)
    net, workload = start(case)
    parts = [value_of(net, micro, workload.loss) for micros in micro_batches(case, 0) for micro in micros]
    whole = value_of(net, whole_batch(case, 0), workload.loss)
    assert whole.dtype == torch.float64 and len(parts) == 6
    assert abs(sum(parts).item() / 6 - whole.item()) < 1e-14
    assert len({part.item() for part in parts}) == 6


def test_what_equal_means():
    assert is_equal(GOOD)
    for wrong in (
        {"loss": 2e-12},
        {"grads": 2e-12},
        {"norm": 2e-12},
        {"params": 2e-12},
        {"exact": False},
        {"alike": False},
        {"failure": "it fell over"},
    ):
        assert not is_equal(replace(GOOD, **wrong)), wrong
    single = replace(GOOD, case=replace(CASE, dtype="float32"), params=1e-3, grads=1e-6)
    assert is_equal(single) and not is_equal(replace(single, grads=1e-4))
    assert apart({"a": torch.ones(2)}, {"a": torch.tensor([1.0, 3.0])}) == 2
    assert apart({"a": torch.ones(2)}, {"b": torch.ones(2)}) == apart({"a": torch.ones(2)}, {"a": torch.ones(3)}) == float("inf")


def test_stages_are_compared_where_they_sum_in_the_same_order():
    def outcomes(case, bits):
        return [replace(GOOD, case=replace(case, stage=stage), bits=one) for stage, one in enumerate(bits)]

    assert not unlike(outcomes(CASE, "aaaa"))
    assert [b.stage for _, b in unlike(outcomes(CASE, "aaba"))] == [2]
    assert not unlike(outcomes(replace(CASE, micros=3), "aabb"))
    assert [b.stage for _, b in unlike(outcomes(replace(CASE, micros=3), "abbc"))] == [1, 3]
    assert len(unlike(outcomes(replace(CASE, micros=3, dp=1), "aabb"))) == 2
    assert not unlike([*outcomes(CASE, "aaaa"), *outcomes(replace(CASE, clip=False), "bbbb")])


def test_one_rank_runs_here():
    """Every stage is the same program then."""
    found = outcomes_of([Case("ResNet, group norm", 1, stage, 1, True, False) for stage in (0, 3)])
    assert all(is_equal(outcome) for outcome in found) and not unlike(found)


def test_what_fails_is_an_outcome(monkeypatch):
    monkeypatch.setattr("packhorse.bench.equality_job.packhorse.plan", lambda *_, **__: 1 / 0)
    (found,) = outcomes_of([replace(CASE, dp=1)])
    assert found.failure == "ZeroDivisionError: division by zero" and not is_equal(found)


def test_the_table(monkeypatch, tmp_path, capsys):
    asked = []

    def instead(cases):
        asked.extend(cases)
        return [replace(GOOD, case=case, loss=(case.stage == 2 and case.dp == 3) * 1e-3) for case in cases]

    monkeypatch.setattr(equality, "outcomes_of", instead)
    page = tmp_path / "page.md"
    page.write_text("# Ranks\n\n" + "\n".join(f"{begin}\n{end}" for begin, end in equality.MARKS.values()) + "\nthe end\n")
    assert run_bench("equality", ["bert", "--over", "dp", "--write", str(page)], as_json=False) == 1
    assert asked == [case for case in every_case() if case.model == "BERT"]
    text = page.read_text()
    assert "120 of 128 cases" in text and text.endswith("the end\n")
    assert "| BERT | 3 | 32 | 1.0e-03 |" in text and "| BERT | 4 | 32 | 0.0e+00 |" in text
    assert "- BERT, dp 3, stage 2, micro-batches 3, clipped, recomputing: differs" in text
    assert run_bench("equality", ["bert", "--over", "dp"], as_json=True) == 1
    assert len(json.loads(capsys.readouterr().out.split("\n")[-2])["outcomes"]) == 128
    assert "other bits: GPT, dp 2, stage 0" in render([GOOD, replace(GOOD, case=replace(CASE, stage=1), bits="b")])
    assert asdict(GOOD)["case"]["model"] == "GPT"


def test_the_table_over_tp(monkeypatch, tmp_path, capsys):
    asked = []

    def instead(cases):
        asked.extend(cases)
        return [replace(GOOD, case=case, alike=case.tp < 4 or not case.sequence, norm=case.tp * 1e-14) for case in cases]

    monkeypatch.setattr(equality, "outcomes_of", instead)
    page = tmp_path / "page.md"
    page.write_text("\n".join(line for marks in equality.MARKS.values() for line in marks))
    assert run_bench("equality", ["qwen", "--over", "tp", "--write", str(page)], as_json=False) == 1
    assert sorted(map(str, asked)) == sorted(str(case) for case in every_mesh_case() if case.model == "Qwen3")
    text = page.read_text()
    assert "35 of 40 cases" in text and "| Qwen3 | 2 | 2 | 12 | 1.0e-13 | 1.0e-13 | 2.0e-14 | 1.0e-13 | 12 |" in text
    assert text.count(": tp ranks differ") == 5 and "- Qwen3, dp 1, tp 4, stage 0, micro-batches" in text
    asked.clear()
    assert run_bench("equality", ["qwen", "--over", "tp", "--ranks", "2"], as_json=False) == 0
    assert {case.mesh.world_size for case in asked} == {1, 2} and len(asked) == 2 + 8 + 3
    capsys.readouterr()


def test_a_model_that_there_is_not():
    assert "equality" in NAMES
    with pytest.raises(UserError, match="no model is called mamba; the models are GPT; BERT"):
        run_bench("equality", ["mamba"], as_json=False)
    with pytest.raises(UserError, match="no model is called resnet; the models are GPT, 4 heads"):
        run_bench("equality", ["resnet", "--over", "tp"], as_json=False)
