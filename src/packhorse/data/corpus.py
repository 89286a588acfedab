"""Files -> one array of bytes to train on and one to validate on. A token is a byte, so the vocabulary is 256 and nothing is decoded.

Known shortcoming: the whole corpus is held in memory (1 byte a token), which is meant for text of up to a few GB.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from packhorse.errors import DataError

STDLIB = "stdlib"
TEXT_SUFFIXES = frozenset(
    {".c", ".cfg", ".cpp", ".css", ".csv", ".h", ".html", ".ini", ".java", ".js", ".json", ".jsonl", ".log", ".md", ".py", ".rs", ".rst"}
    | {".sh", ".tex", ".toml", ".ts", ".tsv", ".txt", ".xml", ".yaml", ".yml"}
)
# Not the library itself: installed packages, tests, caches, an editor, demos, and folders that are nearly all tables.
_STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "__pycache__", "encodings", "pydoc_data"}
    | {"lib2to3", "ensurepip", "lib-dynload"}
)
_VALIDATION_SHARE = 0.05
# Outside this range the split by whole files is too lopsided to be useful (few files, or one very large one).
_USABLE_SHARE = (0.01, 0.25)


@dataclass(frozen=True)
class Corpus:
    """Bytes of the two splits, uint8 arrays of shape (num_train,) and (num_validation,); no file lies in both.

    `digest` is a SHA-256 over both splits: two corpora with the same digest give the same batches.
    `split` says in words how validation text was set apart.
    """

    name: str
    train: npt.NDArray[np.uint8]
    validation: npt.NDArray[np.uint8]
    num_files: int
    digest: str
    split: str


def load_corpus(source: str) -> Corpus:
    """The corpus named by `source`: "stdlib" (the source of the running Python's standard library), a folder of text, or a text file.

    Files are read in sorted order, each distinct content once. A file goes to validation when the SHA-256 of its content says so
    (5 % of files), so a file keeps its side when others come or go. Where that leaves either side with too little, which happens
    with a handful of files, the last 5 % of every file are the validation text instead.

    Raises DataError if the folder is missing or holds no text, or a file cannot be read.
    """
    root = Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source).expanduser()
    paths = list(_stdlib_files(root)) if source == STDLIB else _text_files(root, source)
    contents = _distinct_contents(paths)
    if not contents:
        raise DataError(
            f"data.corpus = {source!r}: found no text in {root}; expected non-empty files that end in one of "
            f"{' '.join(sorted(TEXT_SUFFIXES))}. Point data.corpus at a folder that holds such files, or use 'stdlib'"
        )
    train, validation, split = _split(contents)
    digest = hashlib.sha256(str(len(train)).encode() + b":" + train + validation).hexdigest()
    return Corpus(source, np.frombuffer(train, dtype=np.uint8), np.frombuffer(validation, dtype=np.uint8), len(contents), digest, split)


def _stdlib_files(root: Path) -> Iterator[Path]:
    yield from _walk(root, _STDLIB_EXCLUDED, frozenset({".py"}))


def _text_files(root: Path, source: str) -> list[Path]:
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(
            f"data.corpus = {source!r}: there is no such folder ({root.absolute()}); "
            "give a folder of text files, a text file, or 'stdlib' for the standard library's own source"
        )
    return list(_walk(root, frozenset({"__pycache__"}), TEXT_SUFFIXES))


def _walk(root: Path, excluded: frozenset[str], suffixes: frozenset[str]) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(f"cannot list the folder {error.filename}: {error.strerror}; make it readable or leave it out of data.corpus")

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        # Sorting in place also fixes the order in which os.walk descends.
        subfolders[:] = sorted(name for name in subfolders if name not in excluded and not name.startswith("."))
        for name in sorted(names):
            if Path(name).suffix.lower() in suffixes:
                yield Path(folder, name)


def _distinct_contents(paths: list[Path]) -> dict[bytes, bytes]:
    """SHA-256 -> content, in the order of `paths`. A copy would otherwise put the same text on both sides of the split."""
    contents: dict[bytes, bytes] = {}
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; make it readable or leave it out of data.corpus") from error
        if content:
            contents.setdefault(hashlib.sha256(content).digest(), content)
    return contents


def _split(contents: dict[bytes, bytes]) -> tuple[bytes, bytes, str]:
    limit = int(_VALIDATION_SHARE * 2**32)
    train: list[bytes] = []
    validation: list[bytes] = []
    for digest, content in contents.items():
        (validation if int.from_bytes(digest[:4], "big") < limit else train).append(content)
    share = sum(len(content) for content in validation) / sum(len(content) for content in contents.values())
    if _USABLE_SHARE[0] <= share <= _USABLE_SHARE[1]:
        return b"".join(train), b"".join(validation), f"{len(validation)} of {len(contents)} files"
    cuts = [(content, len(content) - int(len(content) * _VALIDATION_SHARE)) for content in contents.values()]
    train = [content[:cut] for content, cut in cuts]
    validation = [content[cut:] for content, cut in cuts]
    return b"".join(train), b"".join(validation), f"the last {_VALIDATION_SHARE:.0%} of each file"
