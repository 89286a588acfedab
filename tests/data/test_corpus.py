import hashlib
import json

import numpy as np
import pytest

from packhorse.data.corpus import load_corpus, needs_tokenizing
from packhorse.errors import DataError

pytestmark = pytest.mark.pure


def goes_to_validation(content: bytes) -> bool:
    return int(hashlib.sha256(content).hexdigest()[:8], 16) / 2**32 < 0.05


def fill(folder, num_documents=200):
    contents = {}
    for i in range(num_documents):
        path = folder / f"part{i % 3}" / f"{i:03}.txt"
        path.parent.mkdir(exist_ok=True)
        contents[path] = f"file {i} ".encode() * 20
        path.write_bytes(contents[path])
    return [contents[path] for path in sorted(contents)]


def test_split_is_by_whole_file_and_follows_the_hash_of_the_content(tmp_path):
    contents = fill(tmp_path)
    corpus = load_corpus(str(tmp_path))
    assert bytes(corpus.validation) == b"".join(c for c in contents if goes_to_validation(c))
    assert bytes(corpus.train) == b"".join(c for c in contents if not goes_to_validation(c))
    assert corpus.num_documents == 200 and 0 < len(corpus.validation) < 0.25 * len(corpus.train)


def test_copies_count_once_so_no_text_is_on_both_sides(tmp_path):
    fill(tmp_path)
    before = load_corpus(str(tmp_path))
    (tmp_path / "zzz.txt").write_bytes((tmp_path / "part0" / "000.txt").read_bytes())
    after = load_corpus(str(tmp_path))
    assert after.digest == before.digest and (before.num_copies, after.num_copies) == (0, 1)
    assert after.describe() == f"{before.describe()}; 1 copy of files already read"


def test_few_files_give_the_end_of_each(tmp_path):
    (tmp_path / "a.md").write_bytes(b"a" * 100)
    (tmp_path / "b.md").write_bytes(b"b" * 200)
    corpus = load_corpus(str(tmp_path))
    assert bytes(corpus.train) == b"a" * 95 + b"b" * 190
    assert bytes(corpus.validation) == b"a" * 5 + b"b" * 10
    single = load_corpus(str(tmp_path / "a.md"))
    assert (len(single.train), len(single.validation)) == (95, 5)


def test_bytes_that_are_not_utf8_are_tokens_like_any_other(tmp_path):
    (tmp_path / "raw.txt").write_bytes(bytes(range(256)) * 4)
    corpus = load_corpus(str(tmp_path))
    assert bytes(corpus.train) + bytes(corpus.validation) == bytes(range(256)) * 4


def test_the_digest_sees_where_the_split_lies(tmp_path):
    # 100 times x both times, split 95 + 5 and (19 + 77) + (0 + 4).
    (tmp_path / "a.txt").write_bytes(b"x" * 100)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_bytes(b"x" * 19)
    (tmp_path / "deep" / "b.txt").write_bytes(b"x" * 81)
    one, other = load_corpus(str(tmp_path / "a.txt")), load_corpus(str(tmp_path / "deep"))
    assert (len(one.train), len(other.train)) == (95, 96) and one.digest != other.digest


def test_other_files_and_hidden_folders_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text " * 50)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.txt").write_bytes(b"no")
    (tmp_path / ".hidden").write_bytes(b"no")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "README").write_bytes(b"no")
    (tmp_path / "deep" / "b.txt").write_bytes(b"text " * 50)
    (tmp_path / "deep" / "c.TXT").write_bytes(b"text " * 50)
    corpus = load_corpus(str(tmp_path))
    assert corpus.num_documents == 1
    assert corpus.describe().endswith("; 2 files left out (no known suffix), 2 copies of files already read")
    assert load_corpus(str(tmp_path / "a.txt")).num_left_out == 0


def test_the_standard_library_is_there_without_its_tests():
    corpus = load_corpus("stdlib")
    assert len(corpus.train) > 4_000_000 and len(corpus.validation) > 100_000
    assert corpus.num_left_out == 0  # that other files stand beside its source is no news
    text = bytes(corpus.train) + bytes(corpus.validation)
    assert b"class JSONDecoder" in text and b"import torch" not in text
    assert load_corpus("stdlib").digest == corpus.digest


@pytest.mark.parametrize("make", ["missing", "empty", "only_empty_files", "no_text"])
def test_no_text_is_an_error_that_names_the_folder(tmp_path, make):
    folder = tmp_path / "texts"
    if make != "missing":
        folder.mkdir()
    if make == "only_empty_files":
        (folder / "a.txt").touch()
    if make == "no_text":
        (folder / "a.png").write_bytes(b"x")
    with pytest.raises(DataError, match="texts"):
        load_corpus(str(folder))


def test_unreadable_file_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"text")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"gone\.txt"):
        load_corpus(str(tmp_path))


def test_lines_of_jsonl_are_documents_of_bytes(tmp_path):
    texts = [f"text {i}, für sich" for i in range(300)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    corpus = load_corpus(str(path), field="body")
    assert bytes(corpus.validation) == b"".join(t.encode() for t in texts if goes_to_validation(t.encode()))
    assert bytes(corpus.train) == b"".join(t.encode() for t in texts if not goes_to_validation(t.encode()))
    assert corpus.num_documents == 300 and corpus.describe().startswith("300 documents, ") and (corpus.unit, corpus.vocab) == ("byte", 256)
    with pytest.raises(DataError, match=r"a\.jsonl line 1: there is no 'text' among its keys 'body'"):
        load_corpus(str(path))


def test_files_of_tokens(tmp_path):
    np.arange(1000, dtype="<u4").tofile(tmp_path / "a.bin")
    corpus = load_corpus(str(tmp_path / "a.bin"), token_dtype="uint32", vocab=1000)
    assert list(corpus.train) == list(range(950)) and list(corpus.validation) == list(range(950, 1000))
    assert (corpus.unit, corpus.vocab, corpus.num_documents) == ("token", 1000, None)
    assert corpus.describe() == "950 tokens to train on, 50 to validate (the last 5%)"
    (tmp_path / "a.bin").rename(tmp_path / "train.bin")
    np.arange(7, dtype="<u4").tofile(tmp_path / "val.bin")
    pair = load_corpus(str(tmp_path), token_dtype="uint32")
    assert list(pair.train) == list(range(1000)) and list(pair.validation) == list(range(7)) and pair.digest != corpus.digest
    np.arange(1, 8, dtype="<u4").tofile(tmp_path / "val.bin")
    assert load_corpus(str(tmp_path), token_dtype="uint32").digest != pair.digest


def test_a_token_outside_the_vocabulary_is_said_at_once(tmp_path):
    np.array([1, 2, 300, 4] * 100, dtype="<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=r"token 300 at place 2 of .*a\.bin is outside the model's vocabulary of 256"):
        load_corpus(str(tmp_path / "a.bin"), vocab=256)
    with pytest.raises(DataError, match="token 300"):
        load_corpus(str(tmp_path / "a.bin"), vocab=300)
    assert load_corpus(str(tmp_path / "a.bin"), vocab=301).train.max() == 300
    # A file of 16-bit tokens read as 32-bit ones: 1 + 2 * 65536 and 300 + 4 * 65536.
    with pytest.raises(DataError, match=r"token 262,444 at place 1 .*data\.token_dtype"):
        load_corpus(str(tmp_path / "a.bin"), token_dtype="uint32", vocab=50_000)


def test_text_and_a_tokenizer(tmp_path, tokenizer_folder, listener):
    (tmp_path / "texts").mkdir()
    fill(tmp_path / "texts")
    (tmp_path / "texts" / "zzz.txt").write_bytes((tmp_path / "texts" / "part0" / "000.txt").read_bytes())
    (tmp_path / "texts" / "picture.png").write_bytes(b"")
    given = {"tokenizer": str(tokenizer_folder), "folder": tmp_path / "run" / "tokens", "field": "text", "vocab": 300}
    assert needs_tokenizing(str(tmp_path / "texts"), **given) and not (tmp_path / "run").exists()
    corpus = load_corpus(str(tmp_path / "texts"), report=listener, **given)
    assert not needs_tokenizing(str(tmp_path / "texts"), **given)
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    texts = [path.read_text() for path in sorted((tmp_path / "texts").glob("part*/*.txt"))]
    expected = [[*library.encode(text).ids, 0] for text in texts if not goes_to_validation(text.encode())]
    assert np.array_equal(corpus.train, np.concatenate(expected)[:-1])
    assert (corpus.unit, corpus.vocab, corpus.num_documents) == ("token", library.get_vocab_size(), 200)
    assert corpus.describe().endswith("; 1 file left out (no known suffix), 1 copy of files already read")
    again = load_corpus(str(tmp_path / "texts"), report=listener, **given)
    assert again.describe() == corpus.describe()
    assert again.digest == corpus.digest and len(listener.said) == 2
    # The folder that was written is a corpus by itself.
    (kept,) = (path for path in (tmp_path / "run" / "tokens").iterdir() if path.is_dir())
    assert list(load_corpus(str(kept), vocab=300).train) == list(corpus.train)
    first = kept / "train.bin"
    first.write_bytes(b"\1\0" + first.read_bytes()[2:])
    damaged = load_corpus(str(tmp_path / "texts"), report=listener, **given).digest
    (tmp_path / "texts" / "part0" / "000.txt").write_text("elif 0 " * 20)  # as long as before
    changed = load_corpus(str(tmp_path / "texts"), report=listener, **given).digest
    assert len({corpus.digest, damaged, changed}) == 3


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path, tokenizer_folder, listener):
    (tmp_path / "a.txt").write_text("text " * 100)
    np.ones(1000, dtype="<u2").tofile(tmp_path / "a.bin")
    for source in ("a.txt", "a.bin"):
        with pytest.raises(
            DataError,
            match=r"data\.tokenizer = .* tokens and the model a vocabulary of 256.*Set model\.vocab \(.*vocab_size in its config\.json\) to 2\d\d or",
        ):
            load_corpus(str(tmp_path / source), tokenizer=str(tokenizer_folder), vocab=256, folder=tmp_path / "tokens", report=listener)
    with pytest.raises(DataError, match="'bytes' has 256 tokens and the model a vocabulary of 100"):
        load_corpus(str(tmp_path / "a.txt"), vocab=100)
    assert not (tmp_path / "tokens").exists()


def test_a_folder_of_token_files_alone_says_to_name_the_file(tmp_path):
    np.ones(10, dtype="<u2").tofile(tmp_path / "part.bin")
    with pytest.raises(DataError, match=r"found no text in .*it holds part\.bin: name the file itself"):
        load_corpus(str(tmp_path))
