import shutil
from collections import namedtuple

import pytest
import torch

from packhorse.errors import CheckpointError
from packhorse.train.config import RunConfig
from packhorse.train.trial import trial_save

pytestmark = pytest.mark.cpu

Usage = namedtuple("Usage", "total used free")


class State:
    """4000 bytes of tensor."""

    def __init__(self, meta=None):
        self.meta = meta or {}

    def training_state(self):
        return {"w": torch.zeros(1000)}, self.meta


def test_it_is_said_and_nothing_stays(tmp_path):
    said = []
    trial_save(tmp_path / "checkpoints", State(), {}, RunConfig(), said.append)
    assert list((tmp_path / "checkpoints").iterdir()) == []
    (line,) = said
    # 8 bytes of length, a header of 60 characters padded to 64, 4000 bytes of tensor
    assert line == "trial save: a checkpoint has 3.977 KiB; it was written, read back and removed"


@pytest.mark.parametrize(("keep_last", "keep_every", "fits"), [(2, 0, True), (3, 0, False), (1, 500, False), (1, 1000, True)])
def test_a_disk_without_room_for_what_the_run_keeps_is_warned_of(tmp_path, monkeypatch, keep_last, keep_every, fits):
    # Room for three checkpoints of about 4080 bytes: two kept and one being written, or one kept, one of step 1000 and one being written.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**6, 0, 3 * 4100))
    said = []
    trial_save(tmp_path, State(), {}, RunConfig(steps=1000, keep_last=keep_last, keep_every=keep_every), said.append)
    assert (len(said) == 1) == fits and (fits or said[1].startswith("warning: 12.012 KiB are free"))


@pytest.mark.parametrize("case", ["state", "folder"])
def test_what_cannot_be_saved_is_known_before_training(tmp_path, case):
    (tmp_path / "file").write_text("not a folder")
    place = tmp_path / "file" if case == "folder" else tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="nothing was trained yet") as caught:
        trial_save(place, State({"x": object()} if case == "state" else None), {}, RunConfig(), print)
    assert "\n" not in str(caught.value)


def test_what_does_not_read_back_as_written_is_known_before_training(tmp_path, monkeypatch):
    import packhorse.train.trial as trial

    real = trial.save

    def save(path, step, extra):
        real(path, step, extra)
        (path / "tensors.safetensors").write_bytes(b"torn")

    monkeypatch.setattr(trial, "save", save)
    with pytest.raises(CheckpointError, match="damaged: 4 bytes"):
        trial_save(tmp_path, State(), {}, RunConfig(), print)
    assert list(tmp_path.iterdir()) == []
