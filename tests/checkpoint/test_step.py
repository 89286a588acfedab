import pytest
import torch

from packhorse.checkpoint import load, save, write_checkpoint
from packhorse.errors import CheckpointError

pytestmark = pytest.mark.cpu


class Step:
    def __init__(self, **tensors):
        self.tensors, self.meta = tensors, {"steps": 3}

    def training_state(self):
        return self.tensors, self.meta

    def load_training_state(self, tensors, meta):
        self.tensors, self.meta = tensors, meta


def test_save_then_load_into_another(tmp_path):
    save(str(tmp_path / "c"), Step(w=torch.tensor([1.0, 2.0])), {"position": 5})
    other = Step(w=torch.zeros(2))
    other.meta = {}
    assert load(str(tmp_path / "c"), other) == {"position": 5}
    assert other.tensors["w"].tolist() == [1.0, 2.0] and other.meta == {"steps": 3}


@pytest.mark.parametrize(
    ("wanted", "match"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, r"'b' is float32 \(2,\) in the checkpoint and float32 \(3,\) here"),
        ({"a": torch.zeros(2)}, r"'b' is float32 \(2,\) in the checkpoint and absent here"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}, r"'c' is absent in the checkpoint"),
        ({"a": torch.zeros(2, dtype=torch.int64), "b": torch.zeros(3)}, r"'a' is float32 \(2,\) in the checkpoint and int64"),
    ],
)
def test_the_first_difference_is_named_and_nothing_changes(tmp_path, wanted, match):
    save(tmp_path / "c", Step(a=torch.ones(2), b=torch.ones(2)))
    step = Step(**wanted)
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path / "c", step)
    assert step.tensors is not None and all((tensor == 0).all() for tensor in step.tensors.values())


def test_a_checkpoint_of_another_kind(tmp_path):
    write_checkpoint(tmp_path / "c", {"w": torch.ones(2)}, {"epoch": 1})
    with pytest.raises(CheckpointError, match=r"not saved by packhorse\.save"):
        load(tmp_path / "c", Step(w=torch.ones(2)))
