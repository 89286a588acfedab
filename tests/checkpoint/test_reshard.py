import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file

from packhorse.checkpoint import read_checkpoint, write_checkpoint
from packhorse.checkpoint.reshard import reshard
from packhorse.errors import CheckpointError

pytestmark = pytest.mark.cpu


@pytest.fixture
def state(tmp_path):
    torch.manual_seed(0)
    w = torch.randn(7, 11)
    tensors = {
        "w": w,
        "tied": w,
        "b": torch.randn(5).bfloat16(),
        "n": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "u": torch.arange(9, dtype=torch.uint8),
    }
    write_checkpoint(tmp_path / "one", tensors, {"lr": 0.5})
    return tensors


def same(folder, tensors):
    found, meta = read_checkpoint(folder)
    return (
        meta == {"lr": 0.5}
        and found.keys() == tensors.keys()
        and all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in tensors.items())
    )


@pytest.mark.parametrize("count", [1, 2, 3, 7, 500])
def test_there_and_back(tmp_path, state, count):
    reshard(tmp_path / "one", tmp_path / "many", count)
    assert same(tmp_path / "many", state) and read_checkpoint(tmp_path / "many")[0]["w"] is not None
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == count
    reshard(tmp_path / "many", tmp_path / "again", 1)
    assert same(tmp_path / "again", state)
    whole = load_file(tmp_path / "again" / "tensors.safetensors")
    assert whole["w" if "w" in whole else "tied"].shape == (7, 11), "in one file every tensor has its shape"


def test_files_get_equal_shares(tmp_path):
    write_checkpoint(tmp_path / "one", {"a": torch.zeros(1000), "b": torch.zeros(3, 1000)}, {})
    reshard(tmp_path / "one", tmp_path / "many", 4)
    for path in (tmp_path / "many").glob("rank-*"):
        assert sum(tensor.numel() for tensor in load_file(path).values()) == 1000


def test_what_is_there_stays(tmp_path, state):
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        reshard(tmp_path / "one", tmp_path / "other", 2)
    with pytest.raises(CheckpointError, match="0 files"):
        reshard(tmp_path / "one", tmp_path / "new", 0)
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        reshard(tmp_path / "none", tmp_path / "new", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "other"]


def test_it_streams(tmp_path):
    """A tensor of 64 MiB that lies in three files goes into two, then one, and less than half of it is ever in memory of the process's own."""
    code = textwrap.dedent("""
        import sys, threading, time, torch
        from pathlib import Path
        from packhorse.checkpoint import write_checkpoint
        from packhorse.checkpoint.reshard import reshard
        root = Path(sys.argv[1])
        def own_kib():
            return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))
        write_checkpoint(root / "one", {"w": torch.ones(2**24)}, {})
        reshard(root / "one", root / "three", 3)
        before, most, ended = own_kib(), [0], False
        def watch():
            while not ended:
                most[0] = max(most[0], own_kib())
                time.sleep(0.001)
        thread = threading.Thread(target=watch)
        thread.start()
        reshard(root / "three", root / "two", 2)
        reshard(root / "two", root / "again", 1)
        ended = True
        thread.join()
        print(most[0] - before)
    """)
    grown_kib = int(subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True).stdout)
    assert grown_kib < 32 * 1024
