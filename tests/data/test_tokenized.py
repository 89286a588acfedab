import fcntl
import hashlib
import json
import os
import threading

import numpy as np
import pytest

import packhorse.data.documents as reading
import packhorse.data.tokenized as module
from packhorse.data.documents import BLOCK_BYTES, text_files
from packhorse.data.tokenized import Texts, find_tokenized, tokenize
from packhorse.data.tokenizer import load_tokenizer
from packhorse.errors import DataError

pytestmark = pytest.mark.pure


@pytest.fixture
def texts(tmp_path, tokenizer_folder):
    """texts() -> what is to be tokenized in tmp_path/corpus, as it is on the disk now."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    return lambda: Texts(corpus, text_files(str(corpus)), "text", load_tokenizer(str(tokenizer_folder)))


def fill(corpus, num_documents=200):
    """Half of the documents as files, half as lines; returns all in order."""
    files = [f"file {i}: the rider packs\n" for i in range(num_documents // 2)]
    for i, text in enumerate(files):
        (corpus / f"{i:03}.txt").write_text(text)
    lines = [f"line {i}: the horse carries" for i in range(num_documents // 2)]
    (corpus / "zzz.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return files + lines


def packed(documents, library, end=0):
    """The tokens of the documents, one after the other with `end` between them, by the library itself."""
    tokens = []
    for document in documents:
        tokens += ([end] if tokens and end is not None else []) + library.encode(document).ids
    return tokens


def goes_to_validation(text):
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32 < 0.05


def tokens(made):
    return [np.fromfile(path, made.dtype).tolist() for path in (made.train, made.validation)]


def test_documents_are_packed_with_the_end_of_text_between_them(tmp_path, texts, listener):
    documents = fill(tmp_path / "corpus")
    made = tokenize(texts(), tmp_path / "tokens", listener)
    library = texts().tokenizer.library
    validation = [text for text in documents if goes_to_validation(text)]
    assert tokens(made) == [packed([t for t in documents if t not in validation], library), packed(validation, library)]
    assert made.dtype == "uint16" and made.num_documents == 200 and made.split == f"{len(validation)} of 200 documents" and validation
    assert made.num_bytes == sum(map(len, documents)) and made.num_replaced == 0
    assert [made.num_train, made.num_validation] == [len(side) for side in tokens(made)]
    assert listener.bars["tokenizing"] == [made.num_bytes, made.num_bytes]
    assert sorted(path.name for path in made.folder.iterdir()) == ["manifest.json", "train.bin", "val.bin"]


def test_without_an_end_of_text_documents_touch_and_it_is_said(tmp_path, texts, tokenizer_folder, listener):
    documents = fill(tmp_path / "corpus")
    path = tokenizer_folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|something|>"))
    made = tokenize(texts(), tmp_path / "tokens", listener)
    assert tokens(made)[0] == packed([t for t in documents if not goes_to_validation(t)], texts().tokenizer.library, None)
    assert any("names no token that ends a text" in line for line in listener.said)


def test_few_documents_give_the_end_of_each(tmp_path, texts, listener):
    for name, text in (("a.txt", "€" * 110), ("b.txt", "y" * 200)):
        (tmp_path / "corpus" / name).write_text(text)
    made = tokenize(texts(), tmp_path / "tokens", listener)
    library = texts().tokenizer.library
    # 330 bytes without their last 16 end at 314, within the 105th "€", which ends at 315
    assert tokens(made) == [packed(["€" * 105, "y" * 190], library), packed(["€" * 5, "y" * 10], library)]
    assert made.split == "the last 5% of each document" and made.num_replaced == 0


def test_a_large_vocabulary_takes_32_bits(tmp_path, texts, tokenizer_folder, listener):
    path = tokenizer_folder / "tokenizer.json"
    told = json.loads(path.read_text())
    told["model"]["vocab"] |= {f"word{i}": 1000 + i for i in range(65000)}
    path.write_text(json.dumps(told))
    documents = fill(tmp_path / "corpus")
    made = tokenize(texts(), tmp_path / "tokens", listener)
    assert made.dtype == "uint32"
    assert tokens(made)[0] == packed([t for t in documents if not goes_to_validation(t)], texts().tokenizer.library)


def test_what_was_made_is_found_again_at_once(tmp_path, texts, listener, monkeypatch):
    fill(tmp_path / "corpus")
    made = tokenize(texts(), tmp_path / "tokens", listener)
    monkeypatch.setattr(module, "documents", lambda *arguments: pytest.fail("the text was read again"))
    assert tokenize(texts(), tmp_path / "tokens", listener) == made == find_tokenized(texts(), tmp_path / "tokens")


def test_another_text_tokenizer_or_key_is_noticed(tmp_path, texts, tokenizer_folder, listener):
    fill(tmp_path / "corpus")
    names = {texts().name}
    (tmp_path / "corpus" / "000.txt").write_text("something else altogether")
    names.add(texts().name)
    os.utime(tmp_path / "corpus" / "000.txt", ns=(1, 1))
    names.add(texts().name)
    (tmp_path / "corpus" / "001.txt").rename(tmp_path / "corpus" / "001b.txt")
    names.add(texts().name)
    one = texts()
    names.add(Texts(one.root, one.paths, "body", one.tokenizer).name)
    (tokenizer_folder / "tokenizer.json").write_text((tokenizer_folder / "tokenizer.json").read_text() + "\n")
    names.add(texts().name)
    (tokenizer_folder / "tokenizer_config.json").write_text('{"eos_token": "Ġthe"}')
    names.add(texts().name)
    assert len(names) == 7


@pytest.mark.parametrize("damage", ["cut", "manifest", "gone", "foreign"])
def test_a_damaged_folder_is_made_again(tmp_path, texts, listener, damage):
    fill(tmp_path / "corpus")
    made = tokenize(texts(), tmp_path / "tokens", listener)
    before = tokens(made)
    if damage == "cut":
        os.truncate(made.train, 10)
    elif damage == "gone":
        made.validation.unlink()
    else:
        (made.folder / "manifest.json").write_text('{"dtype": "uint16"' + ("" if damage == "manifest" else ', "more": 1}'))
    assert find_tokenized(texts(), tmp_path / "tokens") is None
    assert tokens(tokenize(texts(), tmp_path / "tokens", listener)) == before


def test_a_run_that_was_killed_leaves_nothing_in_the_way(tmp_path, texts, listener):
    documents = fill(tmp_path / "corpus")
    left = tmp_path / "tokens" / ".partial"
    left.mkdir(parents=True)
    (left / "train.bin").write_bytes(b"half")
    made = tokenize(texts(), tmp_path / "tokens", listener)
    assert not left.exists() and tokens(made)[0] == packed([t for t in documents if not goes_to_validation(t)], texts().tokenizer.library)


def test_a_failure_leaves_no_file_behind(tmp_path, texts, listener, monkeypatch):
    fill(tmp_path / "corpus")
    (tmp_path / "corpus" / "zzzz.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"zzzz\.jsonl line 1"):
        tokenize(texts(), tmp_path / "tokens", listener)
    (tmp_path / "corpus" / "zzzz.jsonl").unlink()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"cannot write tokens into .*tokens: No space left on device; make room there"):
        tokenize(texts(), tmp_path / "tokens", listener)
    assert [path.name for path in (tmp_path / "tokens").iterdir()] == [".lock"]


def test_of_two_processes_one_waits_for_the_other(tmp_path, texts, listener):
    fill(tmp_path / "corpus")
    (tmp_path / "tokens").mkdir()
    with open(tmp_path / "tokens" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=tokenize, args=(texts(), tmp_path / "tokens", listener))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and any("waiting for it" in line for line in listener.said)
    waiting.join(30)
    assert find_tokenized(texts(), tmp_path / "tokens") is not None


def test_text_that_is_not_utf8_is_counted(tmp_path, texts, listener):
    (tmp_path / "corpus" / "a.txt").write_bytes(b"the horse \xff\n" * 50)
    assert tokenize(texts(), tmp_path / "tokens", listener).num_replaced == 50


def test_no_text(tmp_path, texts, listener):
    (tmp_path / "corpus" / "a.txt").touch()
    with pytest.raises(DataError, match="found no text in"):
        tokenize(texts(), tmp_path / "tokens", listener)


def test_a_long_document_is_tokenized_in_blocks_that_change_no_token(tmp_path, texts, listener, monkeypatch):
    text = "".join(f"the rider {i} packs\n    what is carried\n\n" for i in range(300))
    (tmp_path / "corpus" / "long.txt").write_text(text)
    (tmp_path / "corpus" / "short.txt").write_text("the horse")
    whole = tokenize(texts(), tmp_path / "whole", listener)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 300)
    monkeypatch.setattr(module, "_BATCH_BYTES", 1000)
    assert len(text) < BLOCK_BYTES
    for one, other in zip(tokens(tokenize(texts(), tmp_path / "blocks", listener)), tokens(whole), strict=True):
        assert np.array_equal(one, other)
