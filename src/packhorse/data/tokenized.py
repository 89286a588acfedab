"""Documents and a tokenizer -> a folder with a token file for each side of the split, made once and found again."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from packhorse.data.documents import BLOCK_BYTES, Document, blocks, character_boundary, decode, documents
from packhorse.data.split import Side, Split, choose_split, goes_to_validation
from packhorse.data.token_file import TokenDtype
from packhorse.data.tokenizer import HuggingFace
from packhorse.errors import DataError
from packhorse.units import format_bytes

TRAIN, VALIDATION = "train.bin", "val.bin"
_MANIFEST = "manifest.json"
# Of the way in which text becomes tokens here; another number is another file.
_FORMAT = 1
# Handed to the tokenizer at once, so that it can work on all cores; its results take about a hundred bytes a token.
_BATCH_BYTES = 4 * BLOCK_BYTES


class Report(Protocol):
    """Where it is said what is going on."""

    def say(self, text: str) -> None: ...

    def progress(self, title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
        """Inside, calling the value with a number of bytes moves a bar of `total` bytes forward."""
        ...


@dataclass(frozen=True)
class Texts:
    """What is to be tokenized: files in order below `root`, the key of the text in a line of JSONL, and the tokenizer."""

    root: Path
    paths: list[Path]
    field: str
    tokenizer: HuggingFace

    @cached_property
    def name(self) -> str:
        """A digest over the tokenizer and each file's name, size and time of change: other text has another name. Reads no text."""
        files = []
        for path in self.paths:
            status = _status(path)
            files.append((os.path.relpath(path, self.root.parent), status.st_size, status.st_mtime_ns))
        told = [_FORMAT, self.field, self.tokenizer.digest, self.tokenizer.end_of_text, files]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Tokenized:
    """A folder that holds train.bin and val.bin, tokens of `dtype`, and manifest.json with the rest of these fields.

    `digest` is a SHA-256 over every token of both sides. `num_replaced` characters stand for bytes that were not UTF-8. `num_copies` files were
    copies of others and passed over.
    """

    folder: Path
    dtype: TokenDtype
    num_train: int
    num_validation: int
    num_documents: int
    num_bytes: int
    num_replaced: int
    split: str
    digest: str
    num_copies: int = 0

    @property
    def train(self) -> Path:
        return self.folder / TRAIN

    @property
    def validation(self) -> Path:
        return self.folder / VALIDATION


def find_tokenized(texts: Texts, folder: Path) -> Tokenized | None:
    """What `tokenize` has made of `texts` in `folder`, or None. Raises DataError if a file of text cannot be looked at."""
    place = folder / texts.name
    try:
        told = json.loads((place / _MANIFEST).read_bytes())
        found = Tokenized(folder=place, **told)
        sizes = [found.train.stat().st_size, found.validation.stat().st_size]
    except (OSError, ValueError, TypeError):
        return None
    itemsize = np.dtype(found.dtype).itemsize
    return found if sizes == [found.num_train * itemsize, found.num_validation * itemsize] else None


def tokenize(texts: Texts, folder: Path, report: Report) -> Tokenized:
    """Tokenizes `texts` into a folder of its own in `folder`, or finds what an earlier call has made there.

    Two passes over the text, a document at a time, in memory that does not grow with it: the first divides training from validation, the second
    tokenizes. Documents of a side follow one another with the tokenizer's end-of-text token between them. A document above 1 MiB is tokenized in
    blocks, see `blocks`. The folder appears whole or not at all; of two processes one works and the other waits.

    Raises DataError as `documents`, if there is no text, or if the folder cannot be written.
    """
    if found := find_tokenized(texts, folder):
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder, report):
            return find_tokenized(texts, folder) or _make(texts, folder, report)
    except OSError as error:
        raise DataError(
            f"cannot write tokens into {folder}: {error.strerror}; make room there (2 to 4 bytes a token), or choose another run.dir"
        ) from error


def _make(texts: Texts, folder: Path, report: Report) -> Tokenized:
    staging, place = folder / ".partial", folder / texts.name
    for left_over in (staging, place):  # of a process that was killed, or a file that lost its end since
        shutil.rmtree(left_over, ignore_errors=True)
    staging.mkdir()
    try:
        made = _write(texts, staging, report)
        staging.rename(place)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    found = Tokenized(folder=place, **made)
    documents = f"{found.num_documents:,} document{'s' * (found.num_documents != 1)}"
    num_tokens = found.num_train + found.num_validation
    report.say(f"tokenized {documents}, {format_bytes(found.num_bytes)}, into {num_tokens:,} tokens, kept in {place}")
    return found


def _write(texts: Texts, staging: Path, report: Report) -> dict[str, Any]:
    total = sum(_status(path).st_size for path in texts.paths)
    report.say(f"tokenizing {format_bytes(total)} of text with {texts.tokenizer.name}, once")
    if texts.tokenizer.end_of_text is None:
        report.say("the tokenizer names no token that ends a text: documents follow each other with nothing between them")
    split, survey = _survey(texts, total, report)
    dtype: TokenDtype = "uint16" if texts.tokenizer.vocab <= 2**16 else "uint32"
    sides: dict[Side, _Side] = {"train": _Side(staging / TRAIN, dtype), "validation": _Side(staging / VALIDATION, dtype)}
    num_replaced = survey.num_replaced
    with report.progress("tokenizing", survey.num_bytes) as advance:
        for batch in _batches(_pieces(texts, split)):
            decoded = [decode(piece.raw) for piece in batch]
            num_replaced += sum(replaced for _, replaced in decoded)
            for piece, ids in zip(batch, texts.tokenizer.encode([text for text, _ in decoded]), strict=True):
                side = sides[piece.side]
                if piece.begins and side.num_tokens and texts.tokenizer.end_of_text is not None:
                    side.append([texts.tokenizer.end_of_text])
                side.append(ids)
            advance(sum(len(piece.raw) for piece in batch))
    digests = [side.close() for side in sides.values()]
    made = {
        "dtype": dtype,
        "num_train": sides["train"].num_tokens,
        "num_validation": sides["validation"].num_tokens,
        "num_documents": survey.num_documents,
        "num_bytes": survey.num_bytes,
        "num_replaced": num_replaced,
        "num_copies": survey.num_copies,
        "split": split.in_words,
        "digest": hashlib.sha256(f"{dtype}:{digests}".encode()).hexdigest(),
    }
    with open(staging / _MANIFEST, "w", encoding="utf-8") as file:
        json.dump(made, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    return made


@dataclass(frozen=True)
class _Survey:
    num_documents: int
    num_bytes: int
    num_replaced: int
    num_copies: int


def _survey(texts: Texts, total: int, report: Report) -> tuple[Split, _Survey]:
    num_documents, num_bytes, num_validation, validation_bytes, num_replaced = 0, 0, 0, 0, 0
    copies: list[Path] = []
    with report.progress("reading", total) as advance:
        for document in documents(texts.paths, texts.field, copies.append):
            num_documents, num_bytes, num_replaced = num_documents + 1, num_bytes + document.num_bytes, num_replaced + document.num_replaced
            if goes_to_validation(document.digest):
                num_validation, validation_bytes = num_validation + 1, validation_bytes + document.num_bytes
            advance(document.num_bytes)
    if not num_documents:
        raise DataError(f"found no text in {texts.root}, only empty files; point data.corpus at text")
    split = choose_split(
        num_documents=num_documents, num_validation=num_validation, num_bytes=num_bytes, validation_bytes=validation_bytes, name="documents"
    )
    return split, _Survey(num_documents, num_bytes, num_replaced, len(copies))


@dataclass(frozen=True)
class _Piece:
    """A block of a document; `begins` if it is the first that goes to `side`."""

    side: Side
    begins: bool
    raw: bytes


def _pieces(texts: Texts, split: Split) -> Iterator[_Piece]:
    for document in documents(texts.paths, texts.field):
        cut = _cut(document, split)
        parts: list[tuple[Side, int, int]] = [("train", 0, cut), ("validation", cut, document.num_bytes)]
        for side, start, stop in parts:
            for number, raw in enumerate(blocks(document, start, stop)):
                yield _Piece(side, number == 0, raw)


def _cut(document: Document, split: Split) -> int:
    cut = split.end_of_training(document.digest, document.num_bytes)
    return cut if cut in (0, document.num_bytes) else character_boundary(document, cut)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += len(piece.raw)
        if num_bytes >= _BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


class _Side:
    """A token file being written."""

    def __init__(self, path: Path, dtype: TokenDtype) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  closed by close, or with the process that fails
        self._kind = np.dtype(dtype).newbyteorder("<")
        self._digest = hashlib.sha256()
        self.num_tokens = 0

    def append(self, ids: list[int]) -> None:
        raw = np.array(ids, self._kind).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self.num_tokens += len(ids)

    def close(self) -> str:
        """Brings all of it to the disk; the SHA-256 of what was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()


@contextmanager
def _alone(folder: Path, report: Report) -> Iterator[None]:
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report.say(f"another process is writing tokens into {folder}; waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; make it readable or leave it out of data.corpus") from error
