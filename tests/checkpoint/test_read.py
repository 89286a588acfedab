import hashlib
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from packhorse.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint
from packhorse.errors import CheckpointError

pytestmark = pytest.mark.cpu


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(tmp_path / "step-1", {"w": torch.arange(40.0), "b": torch.ones(3)}, {"lr": 0.5})
    return tmp_path / "step-1"


def forge(folder, **changes):
    """A manifest with other content and a checksum that fits it."""
    body = json.loads((folder / "manifest.json").read_bytes())["body"] | changes
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    (folder / "manifest.json").write_text(json.dumps({"body": body, "digest": hashlib.sha256(canonical).hexdigest()}))


def entry(path):
    content = path.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]


def refused(folder, match):
    with pytest.raises(CheckpointError, match=match):
        read_checkpoint(folder)
    return True


def test_any_flipped_bit_in_any_file_is_refused_and_the_file_named(folder):
    for name in ("manifest.json", "tensors.safetensors"):
        path = folder / name
        content = path.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 97)):
            for bit in (0, 3, 7):
                flipped = bytearray(content)
                flipped[place] ^= 1 << bit
                path.write_bytes(flipped)
                refused(folder, name)
        path.write_bytes(content)
    assert read_checkpoint(folder)[1] == {"lr": 0.5}


@pytest.mark.parametrize("size", [0, 1, 100])
@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_cut_short(folder, name, size):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:size])
    refused(folder, name)


@pytest.mark.parametrize("name", ["manifest.json", "tensors.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    refused(folder, name)


def test_no_folder_and_foreign_folders(tmp_path):
    refused(tmp_path / "nowhere", "there is no checkpoint at")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "manifest.json is missing")
    foreign = (b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"body": {"format": "other"}, "digest": ""}', b'{"body": [], "digest": 1}')
    for content in foreign:
        (tmp_path / "empty" / "manifest.json").write_bytes(content)
        refused(tmp_path / "empty", "is not the manifest of a packhorse checkpoint")


def test_unknown_version_says_both(folder):
    forge(folder, version=3)
    refused(folder, "format version 3, and this packhorse reads versions 1 to 2")


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": {"tensors.safetensors": 3}},
        {"files": {"tensors.safetensors": [None, None]}},
        {"tensors": {"w": ["F32", 5]}},
        {"aliases": [1]},
        {"meta": 1},
    ],
)
def test_forged_types(folder, changes):
    forge(folder, **changes)
    refused(folder, "manifest.json")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hostname", "sub/x.safetensors", "..", ".", "", "a\\b", "a\0b"])
def test_names_that_lead_out_of_the_folder(folder, name):
    shutil.copy(folder / "tensors.safetensors", folder.parent / "outside.safetensors")
    forge(folder, files={name: entry(folder / "tensors.safetensors")})
    refused(folder, "not a plain file name")


def test_links_are_refused_even_with_the_right_content(folder, tmp_path):
    for name in ("tensors.safetensors", "manifest.json"):
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
        refused(folder, f"{name} is not an ordinary file")
        (folder / name).unlink()
        (tmp_path / name).rename(folder / name)
    read_checkpoint(folder)


class Bomb:
    def __reduce__(self):
        return (exec, ("import pathlib, sys; sys.bomb_went_off = True",))


def test_a_planted_pickle_is_never_loaded(folder):
    bomb = pickle.dumps(Bomb())
    for name in ("optimizer.pt", ".metadata", "data.pkl"):
        (folder / name).write_bytes(bomb)
    read_checkpoint(folder)  # beside the listed files: ignored
    torch.save({"w": torch.ones(2)}, folder / "model.pt")
    for name in ("optimizer.pt", "model.pt"):
        forge(folder, files={name: entry(folder / name)})
        refused(folder, f"{name} is not a safetensors file")
    import sys

    assert not hasattr(sys, "bomb_went_off")


def test_tensors_that_the_manifest_does_not_list(folder):
    save_file({"w": torch.ones(40), "b": torch.ones(4)}, folder / "tensors.safetensors")
    forge(folder, files={"tensors.safetensors": entry(folder / "tensors.safetensors")})
    refused(folder, "does not list the tensors")
    forge(folder, tensors={"w": ["F32", [40]], "b": ["F32", [4]]}, aliases={"x": "nothing"})
    refused(folder, "does not list the tensors")


def test_only_what_is_asked_for_is_read_and_every_byte_is_checked(tmp_path):
    w = torch.arange(3.0)
    write_checkpoint(tmp_path / "c", {"param/w": w, "param/tied": w, "buffer/b": torch.ones(2), "state/m": torch.zeros(5)}, {"n": 1})
    tensors, meta = read_checkpoint(tmp_path / "c", ("param/", "buffer/"))
    assert tensors.keys() == {"param/w", "param/tied", "buffer/b"} and tensors["param/w"] is tensors["param/tied"] and meta == {"n": 1}
    assert torch.equal(tensors["param/w"], w)
    content = (tmp_path / "c" / "tensors.safetensors").read_bytes()
    (tmp_path / "c" / "tensors.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(tmp_path / "c", ("buffer/",))


def test_newest_skips_what_is_not_whole_and_says_why(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere") is None
    for step in (2, 10, 30):
        write_checkpoint(tmp_path / f"step-{step}", {"w": torch.ones(4)}, {})
    (tmp_path / "step-30" / "manifest.json").unlink()
    (tmp_path / "step-40").mkdir()
    (tmp_path / ".staging-step-50-1").mkdir()
    (tmp_path / "step-x").mkdir()
    said = []
    assert newest_checkpoint(tmp_path, said.append) == tmp_path / "step-10"
    assert [line.split(":")[0] for line in said] == ["skipped step-40", "skipped step-30"]
    shutil.rmtree(tmp_path / "step-10")
    shutil.rmtree(tmp_path / "step-2")
    assert newest_checkpoint(tmp_path, said.append) is None
