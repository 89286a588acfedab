"""Four ranks and the axes of their mesh (mesh_job.py), judged by what the mesh says by hand and by plain PyTorch."""

import os
from pathlib import Path

import pytest
import torch

from mesh_job import CLIP, MESHES, NUM, SHAPES, numbers
from packhorse.bench.jobs import run_job
from shared import once

pytestmark = pytest.mark.cpu
BOUND = 8 * 2.0**-24  # relative: sums of some ten squares, and of their roots, each rounded

# (mesh, rank) -> who is on each axis with it
AXES = {
    "dp 2, tp 2": lambda r: {"world": [0, 1, 2, 3], "dp": [r % 2, r % 2 + 2], "tp": [r - r % 2, r - r % 2 + 1]},
    "dp 4": lambda r: {"world": [0, 1, 2, 3], "dp": [0, 1, 2, 3], "tp": [r]},
    "tp 4": lambda r: {"world": [0, 1, 2, 3], "dp": [r], "tp": [0, 1, 2, 3]},
}
EACH = pytest.mark.parametrize(("mesh", "rank"), [(mesh, rank) for mesh in MESHES for rank in range(4)])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    environment = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    return once(tmp_path_factory, "mesh", lambda: run_job("mesh_job", {}, 4, seconds=120, environment=environment))


@EACH
def test_axes(mesh, rank, found):
    seen, expected = found[rank][mesh], AXES[mesh](rank)
    assert seen["gathered"] == expected, "an axis of one rank gives what it is given"
    assert seen["axes"] == {axis: members for axis, members in expected.items() if len(members) > 1}
    assert seen["transports"] == len({tuple(members) for members in seen["axes"].values()}), "the same ranks share one"


@EACH
def test_each_axis_sums_over_its_ranks(mesh, rank, found):
    seen = found[rank][mesh]["sums"]
    assert seen.pop("exact")
    assert seen == {axis: [float(sum(members))] * NUM for axis, members in AXES[mesh](rank).items() if len(members) > 1}


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("mesh", MESHES)
def test_the_norm(mesh, stage, found):
    """Each gradient counts once, wherever it lies and on however many ranks, and all ranks have the same bits."""
    parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in SHAPES.values()]
    for name, parameter in zip(SHAPES, parameters):
        parameter.grad = numbers(name)
    expected = torch.nn.utils.clip_grad_norm_(parameters, CLIP).item()
    seen = [rank[mesh]["norms"][str(stage)] for rank in found]
    assert all(rank == seen[0] for rank in seen) and seen[0]["exact"]
    assert seen[0]["grad_norm"] == pytest.approx(expected, rel=BOUND)
    assert seen[0]["clip_coefficient"] == pytest.approx(CLIP / expected, rel=BOUND + 1e-6)


def test_tp_ranks_have_one_batch(found):
    for rank in found:
        assert "rank 1 was given another batch than rank 0" in rank["same batch"] and "rank // 2" in rank["same batch"]


def test_one_fails_and_all_hear_of_it(found):
    assert found[3]["one fails"] == "no room"
    for rank in range(3):
        assert found[rank]["one fails"].startswith("rank 3 failed first, at step 2: ValueError: no room"), found[rank]
