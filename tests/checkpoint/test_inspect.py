import pytest
import torch

from packhorse.checkpoint import write_checkpoint
from packhorse.checkpoint.inspect import checkpoints_in, inspect, is_checkpoint
from packhorse.errors import CheckpointError

pytestmark = pytest.mark.cpu


@pytest.fixture
def run(tmp_path):
    for name in ("step-10", "step-9", "aside-0-step-12"):
        write_checkpoint(tmp_path / "checkpoints" / name, {"w": torch.ones(4)}, {})
    (tmp_path / "checkpoints" / "step-11").mkdir()
    (tmp_path / "checkpoints" / ".staging-step-13-1").mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()
    return tmp_path


def test_those_of_a_run_in_the_order_of_steps_and_those_set_aside(run):
    expected = ["step-9", "step-10", "step-11", "aside-0-step-12"]
    assert [path.name for path in checkpoints_in(run)] == expected == [path.name for path in checkpoints_in(run / "checkpoints")]
    with pytest.raises(CheckpointError, match="there is no folder"):
        checkpoints_in(run / "nowhere")


def test_what_is_seen(run):
    folder = run / "checkpoints"
    whole = inspect(folder / "step-9")
    assert whole.step == 9 and whole.damage is None and whole.to_dict()["whole"]
    assert whole.num_bytes == sum((folder / "step-9" / name).stat().st_size for name in ("tensors.safetensors", "manifest.json"))
    assert whole.saved_s == (folder / "step-9" / "manifest.json").stat().st_mtime
    empty = inspect(folder / "step-11")
    assert empty.damage is not None and "manifest.json is missing" in empty.damage and empty.saved_s is None and empty.num_bytes == 0
    (folder / "step-9" / "tensors.safetensors").write_bytes(b"torn")
    assert "damaged: 4 bytes" in str(inspect(folder / "step-9").damage)
    assert inspect(folder / "aside-0-step-12").step is None
    assert "there is no checkpoint" in str(inspect(folder / "step-99").damage)


def test_what_is_meant_as_one_checkpoint(run):
    folder = run / "checkpoints"
    assert is_checkpoint(folder / "step-11") and is_checkpoint(folder / "aside-0-step-12") and is_checkpoint(folder / "step-99")
    assert not is_checkpoint(run) and not is_checkpoint(folder)
