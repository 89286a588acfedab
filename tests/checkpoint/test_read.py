import hashlib
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from packhorse.checkpoint import newest_checkpoint, read_checkpoint, write_checkpoint
from packhorse.checkpoint.layout import Manifest, encode_manifest
from packhorse.checkpoint.read import Checkpoint, open_checkpoint
from packhorse.checkpoint.reshard import reshard
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
    forge(folder, version=4)
    refused(folder, "format version 4, and this packhorse reads versions 1 to 3")


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
    for name in ("optimizer.pt", ".metadata", "data.pkl", "rank-0007.safetensors"):
        (folder / name).write_bytes(bomb)
        refused(folder, f"{name} is not part of this checkpoint")
        (folder / name).rename(folder.parent / name)
    read_checkpoint(folder)
    (folder.parent / "optimizer.pt").rename(folder / "optimizer.pt")
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


# -- of several ranks: 40 elements of w and 3 of b, cut into two files after 19 of w ----------------------------------------------------


@pytest.fixture
def shards(folder):
    reshard(folder, folder.with_name("step-2"), 2)
    return folder.with_name("step-2")


def pieces(folder):
    return json.loads((folder / "manifest.json").read_bytes())["body"]["pieces"]


def test_where_the_pieces_are(shards):
    assert pieces(shards) == {
        "b": [["rank-0000.safetensors", 0, 3]],
        "w": [["rank-0000.safetensors", 0, 19], ["rank-0001.safetensors", 19, 40]],
    }
    assert read_checkpoint(shards)[0]["w"].tolist() == list(range(40))


def test_any_shard_with_a_flipped_bit_missing_or_a_link_is_named(shards, tmp_path):
    for name in ("rank-0000.safetensors", "rank-0001.safetensors"):
        path = shards / name
        content = path.read_bytes()
        for place in range(0, len(content), 23):
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            refused(shards, f"{name} is damaged")
        path.unlink()
        refused(shards, f"{name} is missing")
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
        refused(shards, f"{name} is not an ordinary file")
        path.unlink()
        path.write_bytes(content)
    read_checkpoint(shards)


def test_a_shard_of_another_checkpoint_is_refused(shards, folder):
    write_checkpoint(folder.with_name("other"), {"w": torch.ones(40), "b": torch.ones(3)}, {})
    reshard(folder.with_name("other"), folder.with_name("other-2"), 2)
    shutil.copy(folder.with_name("other-2") / "rank-0001.safetensors", shards)
    refused(shards, "rank-0001.safetensors is damaged")


@pytest.mark.parametrize(
    ("w", "match"),
    [
        ([["rank-0000.safetensors", 0, 19], ["rank-0001.safetensors", 20, 41]], "'w' in rank-0001.safetensors leaves a gap"),
        ([["rank-0000.safetensors", 0, 19], ["rank-0001.safetensors", 18, 39]], "'w' in rank-0001.safetensors overlaps"),
        ([["rank-0000.safetensors", 1, 20], ["rank-0001.safetensors", 20, 41]], "'w' in rank-0000.safetensors leaves a gap"),
        ([["rank-0001.safetensors", 0, 21], ["rank-0000.safetensors", 21, 42]], "does not list the tensors"),
        ([["rank-0000.safetensors", 0, 19]], "does not list the tensors"),
        ([["rank-0000.safetensors", 0, 19], ["rank-0001.safetensors", 19, 41]], "does not list the tensors"),
        ([["rank-0000.safetensors", 0, 19], ["rank-0001.safetensors", 19, 40], ["../x", 40, 41]], r"'w' are in .*expected different files"),
        ([["rank-0000.safetensors", 0, 19], ["/etc/hostname", 19, 40]], "does not list the tensors"),
        ([["rank-0000.safetensors", 0, 19], 5], "is not the manifest"),
    ],
)
def test_pieces_with_a_gap_an_overlap_or_elsewhere(shards, w, match):
    forge(shards, pieces=pieces(shards) | {"w": w})
    refused(shards, match)


def test_fewer_elements_than_the_tensor_has(shards):
    forge(shards, tensors={"w": ["F32", [41]], "b": ["F32", [3]]})
    refused(shards, "'w' end at element 40 of 41")


def test_a_pickle_planted_as_a_shard_is_never_loaded(shards):
    files = json.loads((shards / "manifest.json").read_bytes())["body"]["files"]
    (shards / "rank-0001.safetensors").write_bytes(pickle.dumps(Bomb()))
    refused(shards, "rank-0001.safetensors is damaged")
    forge(shards, files=files | {"rank-0001.safetensors": entry(shards / "rank-0001.safetensors")})
    refused(shards, "rank-0001.safetensors is not a safetensors file")


@pytest.mark.parametrize("strides", [[2], [1, 1], [-1], [10**9]])
def test_strides_that_reach_elsewhere(shards, strides):
    forge(shards, strides={"w": strides})
    refused(shards, "is not the manifest")


def test_version_1_is_read(folder):
    body = json.loads((folder / "manifest.json").read_bytes())["body"]
    old = {name: body[name] for name in ("format", "files", "tensors", "aliases", "meta")} | {"version": 1}
    canonical = json.dumps(old, sort_keys=True, separators=(",", ":")).encode()
    (folder / "manifest.json").write_text(json.dumps({"body": old, "digest": hashlib.sha256(canonical).hexdigest()}))
    tensors, meta = read_checkpoint(folder)
    assert tensors["w"].tolist() == list(range(40)) and tensors["b"].tolist() == [1, 1, 1] and meta == {"lr": 0.5}


def test_a_part_of_a_tensor_is_read_in_the_order_of_memory_that_is_asked_for(tmp_path):
    w = torch.arange(24.0).view(2, 3, 4)
    save_file({"w": w.permute(2, 0, 1).reshape(-1)[:10].clone()}, tmp_path / "x")
    save_file({"w": w.permute(2, 0, 1).reshape(-1)[10:].clone()}, tmp_path / "y")
    manifest = Manifest({}, {"w": ("F32", (2, 3, 4))}, {}, {}, {"w": (3, 1, 6)}, {"w": (("x", 0, 10), ("y", 10, 24))})
    saved = Checkpoint(tmp_path, manifest)
    assert torch.equal(saved.whole("w"), w)
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        moved = w.permute(order).contiguous()
        strides = moved.permute([order.index(dim) for dim in range(3)]).stride()
        assert saved.part("w", (2, 3, 4), strides, 5, 17).tolist() == moved.reshape(-1)[5:17].tolist()
    assert saved.part("w", (2, 3, 4), (12, 4, 1), 3, 3).numel() == 0


# -- of tensor parallel ranks: w of (4, 6) in two parts, of columns 0 and 3 to 5, and of columns 1 and 2 --------------------------------


PARTS = (1, (((0, 1), (3, 6)), ((1, 3),)))


@pytest.fixture
def parts(tmp_path):
    w = torch.arange(24.0).view(4, 6)
    save_file({"w": w[:, [0, 3, 4, 5]].reshape(-1).clone()}, tmp_path / "rank-0000.safetensors")
    save_file({"w": w[:, [1, 2]].reshape(-1).clone()}, tmp_path / "rank-0001.safetensors")
    files = {path.name: entry(path) for path in sorted(tmp_path.glob("rank-*"))}
    pieces = {"w": (("rank-0000.safetensors", 0, 16), ("rank-0001.safetensors", 16, 24))}
    manifest = Manifest(files, {"w": ("F32", (4, 6))}, {}, {}, {}, pieces, {"w": PARTS})
    (tmp_path / "manifest.json").write_bytes(encode_manifest(manifest))
    return tmp_path


def test_parts_are_put_together(parts):
    assert torch.equal(read_checkpoint(parts)[0]["w"], torch.arange(24.0).view(4, 6))
    saved = open_checkpoint(parts)
    assert [saved.elements("w", first, end).tolist() for first, end in ((0, 0), (3, 4), (2, 17))] == [[], [3], list(range(2, 17))]


@pytest.mark.parametrize(
    ("split", "match"),
    [
        ([1, [[[0, 1], [3, 6]], [[2, 4]]]], "the parts of 'w' are not dim 1 of .*leaves a gap after"),
        ([1, [[[0, 1], [3, 6]], [[0, 2]]]], "overlaps"),
        ([1, [[[0, 1], [3, 6]], [[1, 2]]]], "leaves a gap after"),
        ([1, [[[0, 1], [3, 7]], [[1, 3]]]], "end at 7 of 6"),
        ([1, [[[0, 1], [3, 6]], [[1, 3], [6, 6]]]], "is empty"),
        ([1, []], "end at 0 of 6"),
        ([0, PARTS[1]], "end at 6 of 4"),
        ([2, PARTS[1]], "is not the manifest"),
        ([-1, PARTS[1]], "is not the manifest"),
        ([1, [[5]]], "is not the manifest"),
        (5, "is not the manifest"),
    ],
)
def test_parts_with_a_gap_an_overlap_or_of_another_shape(parts, split, match):
    forge(parts, parts={"w": split})
    refused(parts, match)


def test_parts_of_a_tensor_that_is_not_there(parts):
    forge(parts, parts={"w": PARTS, "x": PARTS})
    refused(parts, "is not the manifest")
