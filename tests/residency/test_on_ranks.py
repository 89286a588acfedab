"""Saved values that wait as slices and on the host, on real ranks: the bits of the step that keeps everything, every byte as predicted.

A job on two ranks and one on four (parked_job.py) walk over cases. Copies keep the pace of a slow link, and gathers are started early.
"""

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from parked_job import Case, Found

from packhorse.bench.jobs import run_job
from packhorse.device.device import format_device, load_device
from packhorse.device.links import Level, Link
from shared import once

pytestmark = pytest.mark.cpu
HERE = Path(__file__).parent
DEVICE = replace(load_device(), host_link=Link(1e-5, 4e8), levels=(Level("box", 4, Link(2e-5, 1e9)),))
MESHES = ((1, 2, 0), (2, 1, 3), (2, 2, 3))  # dp, tp, stage
WAYS = (("keep", "blocks"), ("shard", "none"), ("offload", "blocks"))
KEPT = [*(Case("GPT", *mesh) for mesh in MESHES), Case("BERT", 1, 2, 0), Case("Llama", 1, 2, 0)]
OTHERS = [
    Case("GPT", *mesh, residency, recompute, host_budget="1MiB" if residency == "offload" else None)
    for mesh in MESHES
    for residency, recompute in WAYS
    if residency != "shard" or mesh[1] > 1
]
OTHERS += [Case(model, 1, 2, 0, "offload", host_budget="1MiB") for model in ("BERT", "Llama")]
CHOSEN = [Case("GPT", *mesh, "auto", "auto", "90%", "50%") for mesh in MESHES if mesh[1] > 1]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """case -> what was found."""

    def of(case: Case) -> Found:
        ranks = case.dp * case.tp
        asked = {"cases": [asdict(one) for one in (*KEPT, *OTHERS, *CHOSEN) if one.dp * one.tp == ranks]}

        def make():
            path = tmp_path_factory.mktemp("device") / "slow.toml"
            path.write_text(format_device(DEVICE))
            environment = {"PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))}
            return run_job("parked_job", asked | {"device": str(path)}, ranks, seconds=300, environment=environment)

        fields = next(fields for fields in once(tmp_path_factory, f"parked-{ranks}", make) if Case(**fields["case"]) == case)
        return Found(**fields | {"case": case})

    return of


def named(case: Case) -> str:
    return f"{case.model} dp{case.dp} tp{case.tp} stage{case.stage} {case.residency} {case.recompute}"


def kept(case: Case) -> Case:
    return Case(case.model, case.dp, case.tp, case.stage)


@pytest.mark.parametrize("case", KEPT, ids=named)
def test_what_keeps_everything_is_exact(case, found):
    one = found(case)
    assert one.exact and not (one.slices or one.copies or one.mirrors or one.host_bytes)


@pytest.mark.parametrize("case", OTHERS, ids=named)
def test_the_same_bits_and_bytes_as_predicted(case, found):
    one = found(case)
    assert one.bits == found(kept(case)).bits
    assert one.exact
    assert bool(one.slices) == (case.tp > 1 and case.residency != "keep")
    assert bool(one.copies) == bool(one.host_bytes) == (case.residency == "offload")
    assert bool(one.mirrors) == (case.recompute == "blocks")


@pytest.mark.parametrize("case", CHOSEN, ids=named)
def test_ranks_decide_alike_within_a_budget(case, found):
    one, everything = found(case), found(kept(case))
    assert one.bits == everything.bits and one.exact
    assert one.peak_bytes <= 0.9 * everything.peak_bytes
