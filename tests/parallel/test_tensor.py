"""Tensor parallel ranks beside plain PyTorch on one rank and the whole batch. A job on two ranks and one on four (tensor_job.py) walk over cases."""

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from cover import BESIDE_EACH_OTHER_ON_A_MESH, ON_A_MESH, SINGLE_ON_A_MESH, values_of
from packhorse.bench.equality import unlike
from packhorse.bench.equality_cases import MESH_FACTORS, Case
from packhorse.bench.equality_job import Outcome
from packhorse.bench.jobs import run_job
from packhorse.graph.operators import OWN_SLICE, TO_HOST
from shared import once
from tensor_job import RESIDENCIES, WAITING

pytestmark = pytest.mark.cpu
ON_HOST = Case("GPT, 4 heads", 1, 0, 1, clip=True, recompute=False, tp=2, on_host=True)  # optimizer states are on the host
CASES = [*ON_A_MESH, *SINGLE_ON_A_MESH, ON_HOST]
BOUND = 1e-12
# of float32, over the norm of all gradients: sums of some hundred numbers, each rounded to 2^-24 of its size
SINGLE_BOUND = 16 * 2.0**-24
HERE = Path(__file__).parent
SECONDS = 500


@pytest.fixture(scope="module")
def found_on(tmp_path_factory):
    """number of ranks -> what the job on them found."""

    def found(num_ranks: int) -> dict:
        asked = {"cases": [asdict(case) for case in CASES if case.mesh.world_size == num_ranks]}
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))}
        make = lambda: run_job("tensor_job", asked, num_ranks, seconds=SECONDS, environment=environment)  # noqa: E731
        return once(tmp_path_factory, f"tensor-{num_ranks}", make)

    return found


@pytest.fixture(scope="module")
def outcome_of(found_on):
    """case -> its outcome."""

    def outcome(case: Case) -> Outcome:
        fields = next(fields for fields in found_on(case.mesh.world_size)["outcomes"] if Case(**fields["case"]) == case)
        return Outcome(**fields | {"case": case})

    return outcome


def named(case: Case) -> str:
    way = values_of(case)["way"]
    return f"{case.model} tp{case.tp} dp{case.dp} stage{case.stage} x{case.micros}{' clip' * case.clip} {way}{' on host' * case.on_host} {case.dtype}"


def test_the_cases_have_every_value():
    """What the pass makes of every model at every degree, tensor/test_split_graph.py has; here is what runs it. All pairs are in the benchmark."""
    seen = {item for case in CASES for item in values_of(case).items()}
    wanted = {(name, value) for name, values in MESH_FACTORS.items() for value in values if (name, value) != ("tp", 1)}
    assert seen >= {item for item in wanted if item[0] != "model"}
    assert {case.model for case in CASES} >= set(MESH_FACTORS["model"])
    assert {case.mesh.world_size for case in CASES} == {2, 4}


@pytest.mark.parametrize("case", CASES, ids=named)
def test_like_one_rank(case, outcome_of):
    found = outcome_of(case)
    assert not found.failure
    assert found.exact, "measured bytes are the predicted ones, memory and communication, on every rank"
    assert found.alike, "what tp ranks have whole has the same bits on all of them, and the padding of a vocabulary stays zero"
    assert found.recomputed or not case.recompute
    if case.dtype == "float32":
        assert found.grads <= SINGLE_BOUND
    else:
        assert max(found.loss, found.grads, found.norm, found.params) <= BOUND


def test_stages_have_the_same_bits(outcome_of):
    outcomes = [outcome_of(case) for case in BESIDE_EACH_OTHER_ON_A_MESH]
    assert [outcome.case.stage for outcome in outcomes] == [0, 1, 2, 3]
    assert all(outcome.bits for outcome in outcomes) and not unlike(outcomes)


# -- dropout ---------------------------------------------------------------------------------------------------------------------------------


def test_masks_of_a_ranks_own_heads(found_on):
    """Two heads with the same weights, one a rank, have the same gradients, but for their masks."""
    apart = found_on(2)["dropout"]["inside"]
    assert apart["0.0"] <= BOUND and apart["0.3"] > 0.05


def test_masks_of_a_ranks_own_part_of_the_sequence(found_on):
    """Two halves of a sequence that are the same have the same gradients, but for their masks."""
    apart = found_on(2)["dropout"]["outside"]
    assert apart["0.0"] <= BOUND and apart["0.3"] > 0.05


@pytest.mark.parametrize("way", ["recomputed", "recomputed, sequence"])
def test_masks_outside_and_again(way, found_on):
    """Masks on what every rank has are the same on all: else norms and biases, which each rank trains for itself, would go apart. What is computed
    again draws the same masks."""
    kept, again = (found_on(2)["dropout"][way][method] for method in ("none", "blocks"))
    for found in (kept, again):
        assert found["exact"] and len(set(found["losses"])) == 2
        assert found["whole"][0] == found["whole"][1]
    assert [again[name] for name in ("losses", "grads", "state", "whole")] == [kept[name] for name in ("losses", "grads", "state", "whole")]
    assert not kept["draws"] and again["draws"] == ["blocks.0.attention", "blocks.0.dropout"]


# -- half precision --------------------------------------------------------------------------------------------------------------------------


def test_an_overflow_on_one_tp_rank_is_one_on_all(found_on):
    found = found_on(2)["overflow"]
    assert found["finite"] == [[True, True], [True, True], [True, False]] and found["others finite"]
    assert found["skipped"] == [[True, True], [False, False]] and found["scales"][0] == [2.0**15] * 2
    assert not found["moved"] and found["moved after"]
    assert found["whole"][0] == found["whole"][1]


# -- saved values that wait elsewhere --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", WAITING)
def test_slices_and_the_host_change_no_bit(model, found_on):
    """P_a and P_a+cpu (Rajbhandari et al. 2019, section 6.1): what is alike on both ranks is saved once, half on each, or on the host; what is read
    from there is what was saved."""
    kept, cut, away = (found_on(2)["waiting"][model][where] for where in RESIDENCIES)
    assert len({json.dumps(found["bits"]) for found in (kept, cut, away)}) == 1
    assert all(all(found["exact"]) for found in (kept, cut, away))
    assert OWN_SLICE not in kept["ops"] and OWN_SLICE in cut["ops"] and TO_HOST not in cut["ops"] and TO_HOST in away["ops"]
    assert kept["host"] == cut["host"] == 0 < away["host"]
    assert kept["sent"] < cut["sent"], "each slice is sent to the other rank before it is used"
