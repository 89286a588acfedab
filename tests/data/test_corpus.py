import hashlib

import pytest

from packhorse.data.corpus import load_corpus
from packhorse.errors import DataError

pytestmark = pytest.mark.pure


def goes_to_validation(content: bytes) -> bool:
    return int(hashlib.sha256(content).hexdigest()[:8], 16) / 2**32 < 0.05


def fill(folder, num_files=200):
    contents = {}
    for i in range(num_files):
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
    assert corpus.num_files == 200 and 0 < len(corpus.validation) < 0.25 * len(corpus.train)


def test_copies_count_once_so_no_text_is_on_both_sides(tmp_path):
    fill(tmp_path)
    before = load_corpus(str(tmp_path))
    (tmp_path / "zzz.txt").write_bytes((tmp_path / "part0" / "000.txt").read_bytes())
    assert load_corpus(str(tmp_path)).digest == before.digest


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
    assert load_corpus(str(tmp_path)).num_files == 1


def test_the_standard_library_is_there_without_its_tests():
    corpus = load_corpus("stdlib")
    assert len(corpus.train) > 4_000_000 and len(corpus.validation) > 100_000
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
