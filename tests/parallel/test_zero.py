"""Stages of ZeRO on 1 to 4 ranks beside plain PyTorch on one rank and the whole batch. One job a number of ranks walks over its cases."""

from dataclasses import asdict, replace

import pytest

from cover import BESIDE_EACH_OTHER, SINGLE, cover, every_pair, pairs_of
from packhorse.bench.equality import outcomes_of, unlike
from packhorse.bench.equality_cases import Case
from packhorse.bench.equality_job import Outcome
from shared import once

pytestmark = pytest.mark.cpu
# optimizer states on the host: as it is owned whole, sharded, with sharded gradients, with sharded parameters
ON_HOST = [Case("GPT", 2, stage, 1, clip=True, recompute=False, on_host=True) for stage in range(4)]
CASES = [*cover(), *SINGLE, *ON_HOST]
BOUND = 1e-12
# of float32, over the norm of all gradients: sums of some hundred numbers, each rounded to 2^-24 of its size
SINGLE_BOUND = 16 * 2.0**-24


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory):
    """case -> its outcome."""

    def outcome(case: Case) -> Outcome:
        mine = [c for c in CASES if c.dp == case.dp]
        found = once(tmp_path_factory, f"equality-{case.dp}", lambda: [asdict(o) for o in outcomes_of(mine)])
        return next(Outcome(**fields | {"case": case}) for fields in found if Case(**fields["case"]) == case)

    return outcome


def named(case: Case) -> str:
    words = [word for word, is_so in (("clip", case.clip), ("recompute", case.recompute), ("on host", case.on_host)) if is_so]
    return " ".join([case.model, f"dp{case.dp} stage{case.stage} x{case.micros}", *words, case.dtype])


def test_the_cover_covers():
    assert set().union(*(pairs_of(case) for case in cover())) == every_pair()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_like_one_rank(case, outcome_of):
    found = outcome_of(case)
    assert not found.failure
    assert found.exact, "measured bytes are the predicted ones, memory and communication, on every rank"
    assert found.recomputed or not case.recompute
    if case.dtype == "float32":
        assert found.grads <= SINGLE_BOUND
    else:
        assert max(found.loss, found.grads, found.norm, found.params) <= BOUND


@pytest.mark.parametrize("case", [c for c in BESIDE_EACH_OTHER if c.stage], ids=named)
def test_stages_have_the_same_bits(case, outcome_of):
    """With several micro-batches stages 0 and 1 sum over them first, and 2 and 3 over ranks first."""
    outcome = outcome_of(case)
    assert outcome.bits and not unlike([outcome, *(outcome_of(c) for c in BESIDE_EACH_OTHER if replace(c, stage=case.stage) == case)])
