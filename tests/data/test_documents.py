import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packhorse.data.documents as module
from packhorse.data.documents import BLOCK_BYTES, Document, blocks, character_boundary, decode, documents
from packhorse.errors import DataError

pytestmark = pytest.mark.pure


def contents(*paths, field="text"):
    return [b"".join(blocks(document, 0, document.num_bytes)) for document in documents(list(paths), field)]


def write_lines(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_file_is_a_document_and_so_is_a_line_of_jsonl(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
    lines = write_lines(tmp_path / "b.JSONL", {"text": "three\nfour", "id": 3}, {"text": "für"}, {"text": "für"}, {"text": ""})
    found = list(documents([tmp_path / "a.txt", lines], "text"))
    assert contents(tmp_path / "a.txt", lines) == [b"one\ntwo\n", b"three\nfour", "für".encode(), "für".encode()]
    assert [d.digest for d in found] == [hashlib.sha256(c).digest() for c in contents(tmp_path / "a.txt", lines)]
    assert [d.num_bytes for d in found] == [8, 10, 4, 4] and not any(d.num_replaced for d in found)


def test_the_key_of_the_text_is_a_setting_and_blank_lines_and_a_byte_order_mark_are_no_matter(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "x"}\r\n\n   \n{"body": "y"}')
    assert contents(path, field="body") == [b"x", b"y"]


def test_a_long_file_is_read_in_blocks(tmp_path):
    text = b"".join(b"%d bottles on the wall\n" % i for i in range(150_000))
    assert len(text) > 3 * BLOCK_BYTES
    (tmp_path / "long.txt").write_bytes(text)
    (document,) = documents([tmp_path / "long.txt"], "text")
    assert document.content is None and document.num_bytes == len(text) and document.digest == hashlib.sha256(text).digest()
    parts = list(blocks(document, 0, len(text)))
    assert b"".join(parts) == text and len(parts) == 4 and all(len(part) <= BLOCK_BYTES for part in parts)
    assert all(part[:1] in (b" ", b"\n") for part in parts[1:])
    assert b"".join(blocks(document, 12345, 2 * BLOCK_BYTES)) == text[12345 : 2 * BLOCK_BYTES]


@settings(deadline=None)
@given(st.text(st.sampled_from("a é\n€😀"), max_size=60), st.integers(5, 12), st.integers(1, 20))
def test_blocks_join_to_the_whole_and_cut_no_character(text, block_bytes, read_bytes):
    raw = text.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block_bytes)
        reads = iter([raw[i : i + read_bytes] for i in range(0, len(raw), read_bytes)])
        parts = list(module._cut_up(reads))
    assert b"".join(parts) == raw and all(0 < len(part) <= block_bytes for part in parts)
    assert "".join(part.decode() for part in parts) == text  # each by itself


@given(st.binary(max_size=40), st.integers(5, 12))
def test_blocks_of_anything_end(raw, block_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_BYTES", block_bytes)
        assert b"".join(module._cut_up(iter([raw]))) == raw


def test_a_cut_lies_where_a_blank_follows_a_word(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", 16)
    raw = "abc def.\n   ghi, jkl für mno".encode()
    document = Document(None, raw, len(raw), b"")
    # not after "def." or "ghi,": some tokenizers take what follows punctuation with it; the second 16 bytes have no such place at all
    assert list(blocks(document, 0, len(raw))) == [b"abc", b" def.\n   ghi, j", "kl für mno".encode()]


def test_a_boundary_is_where_a_character_begins(tmp_path):
    raw = "aé€😀".encode()  # begins at 0, 1, 3, 6, ends at 10
    (tmp_path / "a.txt").write_bytes(raw)
    for content in (raw, None):
        document = Document(tmp_path / "a.txt", content, 10, b"")
        assert [character_boundary(document, place) for place in range(11)] == [0, 1, 3, 3, 6, 6, 6, 10, 10, 10, 10]


def test_what_is_not_utf8_is_replaced_and_counted(tmp_path):
    assert decode("é\ufffd".encode()) == ("é\ufffd", 0)
    assert decode(b"a\xffb\xfe" + "\ufffd".encode()) == ("a\ufffdb\ufffd\ufffd", 2)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x\xffy"}\n' + rb'{"text": "\ud800 \ud83d\ude00"}' + b"\n")
    assert contents(path) == ["x\ufffdy".encode(), "\ufffd 😀".encode()]
    assert [d.num_replaced for d in documents([path], "text")] == [1, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', r"line 2 is no JSON: Expecting value at column"),
        ("nothing", r"line 2 is no JSON"),
        ("[" * 200_000, r"line 2 is no JSON"),
        ("[1, 2]", r"line 2 holds a list"),
        ('"text"', r"line 2 holds a str"),
        ('{"body": "x", "id": 1}', r"line 2: there is no 'text' among its keys 'body', 'id'; .*data\.field"),
        ("{}", r"line 2: there is no 'text' among its keys \(none\)"),
        ('{"text": null}', r"line 2: 'text' is a NoneType"),
        ('{"text": ["x"]}', r"line 2: 'text' is a list"),
    ],
)
def test_a_line_without_text_is_named(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl " + message) as caught:
        contents(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
