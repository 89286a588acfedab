import errno
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from packhorse.checkpoint import newest_checkpoint, prune_checkpoints, read_checkpoint, write_checkpoint
from packhorse.errors import CheckpointError

pytestmark = pytest.mark.cpu


def state(value=1.0):
    return {"w": torch.full((3, 4), value), "count": torch.tensor(7), "rng": torch.arange(5, dtype=torch.uint8)}


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) and found[n].dtype == expected[n].dtype for n in expected)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_dtype_shape_and_stride_comes_back_bit_equal(tmp_path):
    torch.manual_seed(0)
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8]
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in dtypes}
    tensors |= {
        "bool": torch.tensor([True, False, True]),
        "u8": torch.arange(7, dtype=torch.uint8),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "other empty": torch.zeros(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.tensor([2.0]).expand(4),
        "sliced": torch.arange(20.0)[3:15:3],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        'odd "name"/\n': torch.ones(1),
        "needs grad": torch.nn.Parameter(torch.ones(2)),
    }
    write_checkpoint(tmp_path / "step-1", tensors, {"lr": 0.1 + 0.2, "betas": [0.9, 0.95], "name": "é", "none": None})
    found, meta = read_checkpoint(tmp_path / "step-1")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (found[name], tensor)]
        assert torch.equal(*raw), name
    assert meta == {"lr": 0.1 + 0.2, "betas": [0.9, 0.95], "name": "é", "none": None}
    assert names(tmp_path) == ["step-1"]


def test_the_file_is_what_the_safetensors_library_reads(tmp_path):
    write_checkpoint(tmp_path / "c", state(), {})
    assert same(load_file(tmp_path / "c" / "tensors.safetensors"), state())


def test_tied_tensors_are_stored_once_and_come_back_tied(tmp_path):
    w = torch.randn(1000)
    write_checkpoint(tmp_path / "c", {"embedding": w, "head": w, "view": w[:10], "other shape": w.view(10, 100)}, {})
    found, _ = read_checkpoint(tmp_path / "c")
    assert found["embedding"] is found["head"]
    assert torch.equal(found["view"], w[:10]) and torch.equal(found["other shape"], w.view(10, 100))
    assert (tmp_path / "c" / "tensors.safetensors").stat().st_size < 4 * (1000 + 10 + 1000) + 1000


def test_replacing_an_earlier_checkpoint_of_that_name(tmp_path):
    write_checkpoint(tmp_path / "c", state(1.0), {"n": 1})
    write_checkpoint(tmp_path / "c", state(2.0), {"n": 2})
    found, meta = read_checkpoint(tmp_path / "c")
    assert same(found, state(2.0)) and meta == {"n": 2} and names(tmp_path) == ["c"]


def test_a_folder_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(tmp_path / "c")
    (tmp_path / "file").write_text("text")
    for name in ("c", "link", "file"):
        with pytest.raises(CheckpointError, match="left alone"):
            write_checkpoint(tmp_path / name, state(), {})
    assert (tmp_path / "c" / "thesis.tex").read_text() == "years of work" and names(tmp_path) == ["c", "file", "link"]


@pytest.mark.parametrize("fail_after", [0, 1, 2, 3, 4])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_no_litter(tmp_path, monkeypatch, fail_after):
    write_checkpoint(tmp_path / "step-1", state(1.0), {})
    calls, real = iter(range(100)), os.write

    def write(descriptor, content):
        if next(calls) >= fail_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(os, "write", write)
    for name in ("step-1", "step-2"):
        with pytest.raises(CheckpointError, match=r"No space left on device.*Free space"):
            write_checkpoint(tmp_path / name, state(2.0), {})
    monkeypatch.undo()
    assert names(tmp_path) == ["step-1"] and same(read_checkpoint(tmp_path / "step-1")[0], state(1.0))


def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs leave to mount a small disk")
    try:
        write_checkpoint(disk / "step-1", state(1.0), {})
        with pytest.raises(CheckpointError, match="No space left"):
            write_checkpoint(disk / "step-2", {"w": torch.zeros(2**19)}, {})
        # Room for the tensors, but not for the manifest: the failure comes late.
        room = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        with pytest.raises(CheckpointError, match="No space left"):
            write_checkpoint(disk / "step-3", {"w": torch.zeros(room // 4 - 1500)}, {"long": "x" * 20000})
        assert names(disk) == ["step-1"] and same(read_checkpoint(disk / "step-1")[0], state(1.0))
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot save"):
        write_checkpoint(tmp_path / "file" / "step-1", state(), {})


def test_a_failed_rename_puts_the_earlier_one_back(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "c", state(1.0), {})
    real = Path.rename

    def rename(self, target):
        if self.name.startswith(".staging"):
            raise OSError(errno.EACCES, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="Permission denied"):
        write_checkpoint(tmp_path / "c", state(2.0), {})
    assert names(tmp_path) == ["c"] and same(read_checkpoint(tmp_path / "c")[0], state(1.0))


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    write_checkpoint(tmp_path / "step-5", state(1.0), {})
    (tmp_path / "step-5").rename(tmp_path / ".replaced-step-5")
    assert same(read_checkpoint(tmp_path / "step-5")[0], state(1.0))
    assert newest_checkpoint(tmp_path) == tmp_path / "step-5"
    write_checkpoint(tmp_path / "step-5", state(2.0), {})
    assert names(tmp_path) == ["step-5"] and same(read_checkpoint(tmp_path / "step-5")[0], state(2.0))


def test_a_kill_between_the_two_renames_and_then_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "step-5", state(1.0), {})
    (tmp_path / "step-5").rename(tmp_path / ".replaced-step-5")

    def write(descriptor, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(CheckpointError, match="No space left"):
        write_checkpoint(tmp_path / "step-5", state(2.0), {})
    assert names(tmp_path) == ["step-5"] and same(read_checkpoint(tmp_path / "step-5")[0], state(1.0))


def test_every_tensor_starts_at_a_multiple_of_its_element_size(tmp_path):
    write_checkpoint(tmp_path / "c", {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2, dtype=torch.float64)}, {})
    content = (tmp_path / "c" / "tensors.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    assert (8 + int.from_bytes(content[:8], "little") + header["b"]["data_offsets"][0]) % 8 == 0


def test_left_over_staging_folders_go_and_those_of_a_running_writer_stay(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f".staging-step-3-{ended.pid}").mkdir()
    (tmp_path / f".staging-step-4-{os.getppid()}").mkdir()
    write_checkpoint(tmp_path / "step-5", state(), {})
    assert names(tmp_path) == [f".staging-step-4-{os.getppid()}", "step-5"]


@pytest.mark.parametrize(
    ("tensors", "meta", "word"),
    [
        ({"c": torch.zeros(2, dtype=torch.complex64)}, {}, "'c'"),
        ({"s": torch.zeros(2, 2).to_sparse()}, {}, "'s'"),
        ({}, {"x": object()}, "object"),
    ],
)
def test_what_cannot_be_stored_is_named(tmp_path, tensors, meta, word):
    with pytest.raises(CheckpointError, match=word):
        write_checkpoint(tmp_path / "c", tensors, meta)
    assert names(tmp_path) == []


def test_pruning_keeps_the_last_and_goes_by_number(tmp_path):
    for step in (2, 9, 10, 100):
        write_checkpoint(tmp_path / f"step-{step}", state(step), {})
    (tmp_path / "notes").mkdir()
    assert [path.name for path in prune_checkpoints(tmp_path, 2)] == ["step-2", "step-9"]
    assert names(tmp_path) == ["notes", "step-10", "step-100"]


def test_pruning_never_removes_the_only_good_one(tmp_path):
    write_checkpoint(tmp_path / "step-1", state(), {})
    write_checkpoint(tmp_path / "step-2", state(), {})
    with open(tmp_path / "step-2" / "tensors.safetensors", "r+b") as file:
        file.truncate(10)
    said = []
    assert prune_checkpoints(tmp_path, 1, report=said.append) == []
    assert names(tmp_path) == ["damaged-0-step-2", "step-1"] and len(said) == 1 and "damaged: 10 bytes" in said[0]
    # The next good one counts, the damaged one does not: two good ones stay.
    write_checkpoint(tmp_path / "step-3", state(), {})
    assert prune_checkpoints(tmp_path, 2) == []
    assert names(tmp_path) == ["damaged-0-step-2", "step-1", "step-3"]


def test_a_flipped_bit_in_the_newest_one_is_found_before_anything_is_deleted(tmp_path):
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step-{step}", state(), {})
    with open(tmp_path / "step-2" / "tensors.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    assert prune_checkpoints(tmp_path, 1, report=lambda text: None) == []
    assert same(read_checkpoint(tmp_path / "step-1")[0], state())


def test_fewer_are_kept_when_the_number_is_lowered_and_multiples_stay_for_good(tmp_path):
    for step in (5, 10, 15, 20, 25):
        write_checkpoint(tmp_path / f"step-{step}", state(step), {})
    assert [path.name for path in prune_checkpoints(tmp_path, 1, keep_every=10)] == ["step-5", "step-15"]
    assert names(tmp_path) == ["step-10", "step-20", "step-25"]
    assert [path.name for path in prune_checkpoints(tmp_path, 1)] == ["step-10", "step-20"]


def test_links_are_neither_deleted_nor_counted(tmp_path):
    archive, root = tmp_path / "archive", tmp_path / "root"
    for step in (1, 9):
        write_checkpoint(archive / f"step-{step}", state(step), {})
    for step in (2, 3):
        write_checkpoint(root / f"step-{step}", state(step), {})
    for name in ("step-1", "step-9"):
        (root / name).symlink_to(archive / name)
    (root / "step-11").symlink_to(tmp_path / "nowhere")
    assert [path.name for path in prune_checkpoints(root, 1)] == ["step-2"]
    assert names(root) == ["step-1", "step-11", "step-3", "step-9"] and same(read_checkpoint(archive / "step-1")[0], state(1))


def test_a_kill_between_saving_and_pruning_is_made_up_for(tmp_path):
    for step in (1, 2, 3):  # killed before step-1 went
        write_checkpoint(tmp_path / f"step-{step}", state(step), {})
    write_checkpoint(tmp_path / "step-4", state(4), {})
    assert [path.name for path in prune_checkpoints(tmp_path, 2)] == ["step-1", "step-2"]


def test_what_cannot_be_deleted_is_said_and_does_not_stop_the_next_save(tmp_path, monkeypatch):
    for step in (1, 2):
        write_checkpoint(tmp_path / f"step-{step}", state(step), {})
    said = []

    def rmtree(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", rmtree)
    prune_checkpoints(tmp_path, 1, report=said.append)
    write_checkpoint(tmp_path / "step-3", state(3), {})
    assert "cannot delete outdated checkpoints: Permission denied" in said[0] and newest_checkpoint(tmp_path) == tmp_path / "step-3"


def test_tensors_are_written_one_at_a_time(tmp_path):
    """The whole state must not be held twice: 16 tensors of 8 MiB that all need a copy, in less than half of it."""
    code = textwrap.dedent("""
        import resource, sys, torch
        from pathlib import Path
        from packhorse.checkpoint import write_checkpoint
        base = torch.ones(16, 1024, 2048)
        tensors = {str(i): base[i].t() for i in range(16)}
        write_checkpoint(Path(sys.argv[1]) / "warm", {"w": torch.ones(4).expand(2, 4).t()}, {})
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_checkpoint(Path(sys.argv[1]) / "c", tensors, {})
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    grown_kib = int(subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True).stdout)
    assert grown_kib < 64 * 1024


WRITER = """
import sys, torch
from pathlib import Path
from packhorse.checkpoint import prune_checkpoints, write_checkpoint
root = Path(sys.argv[1])
first = int(sys.argv[2])
for step in range(first, first + 10_000):
    write_checkpoint(root / f"step-{step // 3}", {"w": torch.full((200_000,), float(step)), "n": torch.tensor(step)}, {"step": step})
    print(step, flush=True)
    prune_checkpoints(root, 2)
"""


def test_killed_at_any_moment_the_last_checkpoint_loads(tmp_path):
    """kill -9 at random moments; every third write makes a new name and the others replace one."""
    generator = random.Random(0)
    first = 0
    for _ in range(6):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, tmp_path, str(first)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        last = int(writer.stdout.readline())
        time.sleep(generator.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        last = max([last, *map(int, writer.stdout.read().split("\n")[:-1])])
        writer.wait()
        newest = newest_checkpoint(tmp_path)
        assert newest is not None
        tensors, meta = read_checkpoint(newest)
        assert meta["step"] >= last, "a checkpoint that was reported as written is gone"
        assert (tensors["w"] == meta["step"]).all() and tensors["n"] == meta["step"], "half old, half new"
        first = meta["step"] + 1
    write_checkpoint(tmp_path / "step-99999", state(), {})
    assert not [name for name in names(tmp_path) if name.startswith(".staging")]


def test_the_manifest_says_what_is_inside(tmp_path):
    write_checkpoint(tmp_path / "c", state(), {})
    body = json.loads((tmp_path / "c" / "manifest.json").read_bytes())["body"]
    assert body["format"] == "packhorse-checkpoint" and body["version"] == 2
    assert body["tensors"] == {"w": ["F32", [3, 4]], "count": ["I64", []], "rng": ["U8", [5]]}
    assert body["files"]["tensors.safetensors"][0] == (tmp_path / "c" / "tensors.safetensors").stat().st_size
