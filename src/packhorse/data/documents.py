"""Folders and files -> documents, one after the other, in bounded memory. A text file is a document, and so is each line of JSONL."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from packhorse.errors import DataError

STDLIB = "stdlib"
JSONL = ".jsonl"
TEXT_SUFFIXES = frozenset(
    {".c", ".cfg", ".cpp", ".css", ".csv", ".h", ".html", ".ini", ".java", ".js", ".json", ".jsonl", ".log", ".md", ".py", ".rs", ".rst"}
    | {".sh", ".tex", ".toml", ".ts", ".tsv", ".txt", ".xml", ".yaml", ".yml"}
)
# A longer document is handed on in blocks of this many bytes.
BLOCK_BYTES = 2**20
# Not the library itself: installed packages, tests, caches, an editor, demos, and folders that are nearly all tables.
_STDLIB_EXCLUDED = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "__pycache__", "encodings", "pydoc_data"}
    | {"lib2to3", "ensurepip", "lib-dynload"}
)
# The last character of a word before a blank: a letter or a digit, or part of a character that is not ASCII.
_WORD_END = re.compile(rb"[0-9A-Za-z\x80-\xff](?=[ \n])")
# How far back from the end of a block a word's end is looked for.
_REACH_BYTES = 2**14
# A JSON escape can name half a character (a lone surrogate), which UTF-8 cannot hold.
_HALVES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Document:
    """One text. `content` is the whole of it in bytes, or None where it is a file at `path` of more than BLOCK_BYTES.

    `digest` is the SHA-256 of the content, which has `num_bytes` bytes; `num_replaced` characters of it stand for what was not UTF-8.
    """

    path: Path
    content: bytes | None
    num_bytes: int
    digest: bytes
    num_replaced: int = 0


def root_of(source: str) -> Path:
    """The folder or file that data.corpus = `source` names."""
    return Path(sysconfig.get_path("stdlib")) if source == STDLIB else Path(source).expanduser()


def text_files(source: str) -> list[Path]:
    """The files of data.corpus = `source` in sorted order: the standard library's own .py files, a folder's files of text, or one file.

    Raises DataError if there is no such folder, it cannot be listed, or it holds no file of text.
    """
    root = root_of(source)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(
            f"data.corpus = {source!r}: there is no such folder ({root.absolute()}); "
            "give a folder of text files, a file of text or of tokens, or 'stdlib' for the standard library's own source"
        )
    if source == STDLIB:
        return list(_walk(root, _STDLIB_EXCLUDED, frozenset({".py"})))
    found = list(_walk(root, frozenset({"__pycache__"}), TEXT_SUFFIXES))
    if not found:
        raise no_text(source)
    return found


def num_left_out(source: str) -> int:
    """How many files `text_files` passes over because of how their names end, hidden ones aside; 0 for "stdlib" and for one file."""
    root = root_of(source)
    if source == STDLIB or not root.is_dir():
        return 0
    found = _walk(root, frozenset({"__pycache__"}), None)
    return sum(path.suffix.lower() not in TEXT_SUFFIXES and not path.name.startswith(".") for path in found)


def no_text(source: str) -> DataError:
    """The error of a corpus without a byte of text."""
    root = root_of(source)
    token_files = sorted(path.name for path in root.glob("*.bin")) if root.is_dir() else []
    hint = f"; it holds {token_files[0]}: name the file itself to train on a file of tokens" if token_files else ""
    return DataError(
        f"data.corpus = {source!r}: found no text in {root}; expected non-empty files that end in one of "
        f"{' '.join(sorted(TEXT_SUFFIXES))}{hint}. Point data.corpus at a folder that holds such files, or use 'stdlib'"
    )


def documents(paths: list[Path], field: str, on_copy: Callable[[Path], None] | None = None) -> Iterator[Document]:
    """The documents of `paths` in their order; `field` is the key of the text in a line of JSONL. Empty ones are left out.

    Of files with the same content the first counts: a copy could put the same text on both sides of a split. Lines of JSONL are all kept.
    on_copy hears of each copy that is passed over.
    Raises DataError naming the file, and the line, if one cannot be read, is no JSON object, or has no text under `field`.
    """
    seen: set[bytes] = set()
    for path in paths:
        try:
            with open(path, "rb") as file:
                if path.suffix.lower() == JSONL:
                    yield from _lines(path, file, field)
                elif (document := _whole_file(path, file)).num_bytes:
                    if document.digest not in seen:
                        seen.add(document.digest)
                        yield document
                    elif on_copy is not None:
                        on_copy(path)
        except OSError as error:
            raise _unreadable(path, error) from error


def blocks(document: Document, start: int, stop: int) -> Iterator[bytes]:
    """Bytes [start, stop) of a document, in blocks of at most BLOCK_BYTES that cut no character of UTF-8.

    A cut lies between a word and the blank that follows it, where there is one: tokenizers that split text before each blank then give the
    same tokens as for the whole, and others differ in the token or two at the cut. Raises DataError if the file cannot be read any more.
    """
    if document.content is not None:
        yield from _cut_up(iter([document.content[start:stop]]))
        return
    try:
        with open(document.path, "rb") as file:
            file.seek(start)
            yield from _cut_up(_read(file, stop - start))
    except OSError as error:
        raise _unreadable(document.path, error) from error


def character_boundary(document: Document, place: int) -> int:
    """The first place from `place` on, in bytes, where a character of UTF-8 begins, or the end. Raises DataError as `blocks`."""
    if document.content is not None:
        following = document.content[place : place + 4]
    else:
        try:
            with open(document.path, "rb") as file:
                file.seek(place)
                following = file.read(4)
        except OSError as error:
            raise _unreadable(document.path, error) from error
    none_begins = len(following) if len(following) < 4 else 0  # the end of the document, or no UTF-8 at all
    return place + next((i for i, byte in enumerate(following) if not _continues(byte)), none_begins)


def decode(raw: bytes) -> tuple[str, int]:
    """UTF-8 -> text, and how many characters of it stand for bytes that are not UTF-8 (U+FFFD)."""
    try:
        return raw.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "replace")
        return text, text.count("\ufffd") - raw.count("\ufffd".encode())


def _walk(root: Path, excluded: frozenset[str], suffixes: frozenset[str] | None) -> Iterator[Path]:
    """Files in sorted order, those that end in one of `suffixes` or all."""

    def refuse(error: OSError) -> None:
        raise DataError(f"cannot list the folder {error.filename}: {error.strerror}; make it readable or leave it out of data.corpus")

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        # Sorting in place also fixes the order in which os.walk descends.
        subfolders[:] = sorted(name for name in subfolders if name not in excluded and not name.startswith("."))
        for name in sorted(names):
            if suffixes is None or Path(name).suffix.lower() in suffixes:
                yield Path(folder, name)


def _whole_file(path: Path, file: BinaryIO) -> Document:
    content = file.read(BLOCK_BYTES + 1)
    digest = hashlib.sha256(content)
    if len(content) <= BLOCK_BYTES:
        return Document(path, content, len(content), digest.digest())
    num_bytes = len(content)
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
        num_bytes += len(block)
    return Document(path, None, num_bytes, digest.digest())


def _lines(path: Path, file: BinaryIO, field: str) -> Iterator[Document]:
    for number, raw in enumerate(file, start=1):
        line, num_replaced = decode(raw)
        line = line.removeprefix("\ufeff") if number == 1 else line
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(f"{path} line {number} is no JSON: {reason}; expected one JSON object a line, such as {_sample_line(field)}") from error
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise DataError(f"{path} line {number} holds a {kind}; expected a JSON object with the text in it, such as {_sample_line(field)}")
        text = record.get(field)
        if not isinstance(text, str):
            if field in record:
                seen = f"{field!r} is a {type(text).__name__}"
            else:
                seen = f"there is no {field!r} among its keys {', '.join(map(repr, list(record)[:10])) or '(none)'}"
            raise DataError(f"{path} line {number}: {seen}; expected text there. data.field says which key holds it: --set data.field=NAME")
        text, num_halves = _HALVES.subn("\ufffd", text)
        if content := text.encode("utf-8"):
            yield Document(path, content, len(content), hashlib.sha256(content).digest(), num_replaced + num_halves)


def _sample_line(field: str) -> str:
    return json.dumps({field: "..."})


def _read(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    while num_bytes > 0 and (block := file.read(min(BLOCK_BYTES, num_bytes))):
        num_bytes -= len(block)
        yield block


def _cut_up(reads: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for read in reads:
        rest += read
        start = 0
        while len(rest) - start > BLOCK_BYTES:
            cut = _cut(rest[start : start + BLOCK_BYTES])
            yield rest[start : start + cut]
            start += cut
        rest = rest[start:]
    if rest:
        yield rest


def _cut(block: bytes) -> int:
    """Where to end a block of BLOCK_BYTES bytes that more follow."""
    beginning = max(0, len(block) - _REACH_BYTES)
    if word_ends := list(_WORD_END.finditer(block, beginning)):
        return word_ends[-1].end()
    cut = len(block)
    while cut > len(block) - 4 and _continues(block[cut - 1]):
        cut -= 1
    # `cut - 1` is now a first byte: leave its character to the next block, whole or not
    return cut - 1


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read {path}: {error.strerror}; make it readable or leave it out of data.corpus")
