import os

import numpy as np
import pytest

from packhorse.data.token_file import open_token_file, require_unchanged
from packhorse.errors import DataError

pytestmark = pytest.mark.pure


def write(path, tokens, dtype="<u2"):
    np.asarray(tokens, dtype).tofile(path)
    return path


def sizes():
    """On both sides of 4 MiB, above which only a sample is read."""
    return [1, 10, 2**21, 2**21 + 1, 5 * 2**20]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_mapped_as_they_were_written(tmp_path, dtype):
    written = np.array([7, 300, 65535, 0, 1], dtype)
    found = open_token_file(write(tmp_path / "a.bin", written, dtype), dtype)
    assert list(found.tokens) == list(written) and found.tokens.dtype == np.dtype(dtype) and not found.tokens.flags.writeable
    assert (found.largest, found.largest_at) == (65535, 2)


def test_an_empty_file_has_no_tokens(tmp_path):
    assert len(open_token_file(write(tmp_path / "a.bin", []), "uint16").tokens) == 0


@pytest.mark.parametrize("num_tokens", sizes())
def test_the_digest_sees_the_size_the_dtype_and_both_ends(tmp_path, num_tokens):
    tokens = np.random.default_rng(0).integers(0, 60000, num_tokens, dtype=np.uint16)
    path = tmp_path / "a.bin"
    digest = open_token_file(write(path, tokens), "uint16").digest
    assert open_token_file(path, "uint16").digest == digest
    for changed in (np.append(tokens, 1), np.r_[tokens[:-1], tokens[-1] ^ 1], np.r_[tokens[0] ^ 1, tokens[1:]]):
        assert open_token_file(write(path, changed), "uint16").digest != digest


def test_a_large_file_is_not_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "large.bin"
    with open(path, "wb") as file:  # 1 GiB of nothing, which takes no room on the disk
        file.truncate(2**30)
    read, original = [], os.pread
    monkeypatch.setattr(os, "pread", lambda descriptor, length, offset: read.append((offset, length)) or original(descriptor, length, offset))
    found = open_token_file(path, "uint16")
    assert len(found.tokens) == 2**29 and sum(length for _, length in read) == 4 * 2**20
    assert read[0][0] == 0 and read[-1] == (2**30 - 2**16, 2**16) and max(np.diff([offset for offset, _ in read])) < 1.1 * 2**30 / 63


def test_a_file_that_was_cut_within_a_token(tmp_path):
    path = write(tmp_path / "a.bin", range(100), "<u4")
    os.truncate(path, 398)
    with pytest.raises(DataError, match=r"a\.bin has 398 bytes, which is no multiple of 4, the size of a uint32 token"):
        open_token_file(path, "uint32")
    os.truncate(path, 397)
    with pytest.raises(DataError, match="no multiple of 2"):
        open_token_file(path, "uint16")


def test_a_file_that_cannot_be_read(tmp_path):
    for path in (tmp_path / "missing.bin", tmp_path):
        with pytest.raises(DataError, match=f"cannot read the token file {path}"):
            open_token_file(path, "uint16")


@pytest.mark.parametrize("vocab", [200, 50_000, 150_000])
def test_a_uint32_file_read_as_uint16_is_noticed(tmp_path, vocab):
    path = write(tmp_path / "a.bin", np.random.default_rng(0).integers(1, vocab, 5000), "<u4")
    with pytest.raises(DataError, match="looks like uint32 and is read as uint16"):
        open_token_file(path, "uint16")
    assert len(open_token_file(path, "uint32").tokens) == 5000


@pytest.mark.parametrize("vocab", [2, 17, 300, 65536])
@pytest.mark.parametrize("num_tokens", [200, 2**21 + 2, 2**21 + 1])
def test_a_uint16_file_is_not_taken_for_uint32(tmp_path, vocab, num_tokens):
    path = write(tmp_path / "a.bin", np.random.default_rng(0).integers(0, vocab, num_tokens))
    assert len(open_token_file(path, "uint16").tokens) == num_tokens


def test_a_file_that_cannot_be_uint32_is_not_taken_for_it(tmp_path):
    path = write(tmp_path / "a.bin", [5, 0] * 100 + [5])  # 402 bytes
    assert len(open_token_file(path, "uint16").tokens) == 201


def test_a_file_that_changes_while_it_is_open_is_noticed(tmp_path):
    path = write(tmp_path / "a.bin", range(1000))
    opened = open_token_file(path, "uint16")
    require_unchanged(opened)
    os.utime(path, ns=(0, 0))
    require_unchanged(opened)  # touched only
    with open(path, "r+b") as file:
        file.write(b"\xff\xff")
    with pytest.raises(DataError, match=r"changed while it was being read"):
        require_unchanged(opened)
    for num_bytes in (1000, 3000):
        opened = open_token_file(write(path, range(1000)), "uint16")
        os.truncate(path, num_bytes)
        with pytest.raises(DataError, match=f"it had 2,000 bytes and has {num_bytes:,}"):
            require_unchanged(opened)


def test_a_file_put_in_its_place_does_no_harm(tmp_path):
    opened = open_token_file(write(tmp_path / "a.bin", range(1000)), "uint16")
    write(tmp_path / "b.bin", [1]).rename(tmp_path / "a.bin")
    require_unchanged(opened)
    assert list(opened.tokens) == list(range(1000))
