"""Every kind of parameter, optimizer and precision on two ranks: the bits of plain PyTorch that has the whole model on every rank (replicas.py)."""

import os
from pathlib import Path

import pytest

from packhorse.bench.jobs import run_job
from replicas import CASES
from shared import once

pytestmark = pytest.mark.cpu
LOSS_BOUND = 4 * 2.0**-24  # relative: the mean of the ranks' losses is rounded
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folders = [HERE, HERE.parent / "optim", os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if str(folder))}
    return once(tmp_path_factory, "replicas", lambda: run_job("replicas", {}, 2, seconds=500, environment=environment))


@pytest.mark.parametrize("name", CASES)
def test_like_replicas(name, found):
    """Gradients, parameters and buffers bit for bit; one decision on all ranks about a step that overflowed."""
    case, seen = CASES[name], found[name]
    assert "failure" not in seen, seen
    assert seen["grads"] and seen["names"] and seen["apart"] == 0.0
    assert seen["loss"] <= LOSS_BOUND
    for rank in seen["ranks"]:
        assert rank["exact"]
        assert rank["skipped"] == [[False, False], [case.overflow, case.overflow], [False, False]]
        if case.precision == "fp16":
            assert rank["scale"] == [512.0, 512.0]
