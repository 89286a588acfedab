"""What data.corpus names -> tokens to train on and tokens to validate on.

Three kinds: bytes of text (held in memory, 1 byte a token, meant for up to a few GB); text and a tokenizer (tokenized once into files, see
tokenized.py); files of token numbers. Files are mapped, not read.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from packhorse.data.documents import JSONL, STDLIB, Document, blocks, documents, no_text, num_left_out, root_of, text_files
from packhorse.data.split import VALIDATION_SHARE, choose_split, goes_to_validation
from packhorse.data.token_file import SUFFIX, TokenDtype, TokenFile, Tokens, open_token_file, require_unchanged
from packhorse.data.tokenized import TRAIN, VALIDATION, Report, Texts, Tokenized, find_tokenized, tokenize
from packhorse.data.tokenizer import BYTES, HuggingFace, load_tokenizer
from packhorse.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """Tokens of the two splits, arrays of shape (num_train,) and (num_validation,) in uint8, uint16 or uint32; no text lies in both.

    `digest` is a SHA-256: two corpora with the same digest give the same batches. It is over every token of a text, and over a sample of the
    files where `data.corpus` is token files (`TokenFile.digest`).
    `split` says in words how validation text was set apart. `num_documents` is None for token files, which do not say.
    Tokens lie in [0, vocab); `vocab` None means that nothing bounds them. `files` are those that the tokens are mapped from.
    `num_left_out` files of the folder have no suffix of text; `num_copies` had the content of another, which is read once.
    """

    name: str
    train: Tokens
    validation: Tokens
    num_documents: int | None
    digest: str
    split: str
    unit: Literal["byte", "token"] = "byte"
    vocab: int | None = 256
    num_replaced: int = 0
    files: tuple[TokenFile, ...] = ()
    num_left_out: int = 0
    num_copies: int = 0

    def describe(self) -> str:
        """One line: how much there is, and how it is split."""
        num = self.num_documents
        documents = "" if num is None else f"{num:,} document{'s' * (num != 1)}, "
        replaced = f"; {self.num_replaced:,} characters stand for bytes that are not UTF-8" if self.num_replaced else ""
        passed = [f"{self.num_left_out:,} file{'s' * (self.num_left_out != 1)} left out (no known suffix)"] if self.num_left_out else []
        passed += [f"{self.num_copies:,} cop{'y' if self.num_copies == 1 else 'ies'} of files already read"] if self.num_copies else []
        beside = f"; {', '.join(passed)}" if passed else ""
        train, validation = len(self.train), len(self.validation)
        return f"{documents}{train:,} {self.unit}s to train on, {validation:,} to validate ({self.split}){replaced}{beside}"


def load_corpus(
    source: str,
    *,
    tokenizer: str = BYTES,
    token_dtype: TokenDtype = "uint16",
    field: str = "text",
    vocab: int | None = None,
    folder: Path | None = None,
    report: Report | None = None,
) -> Corpus:
    """The corpus named by `source`: "stdlib" (the source of the running Python's standard library), a folder of text and JSONL, a file of text
    or JSONL, a file of tokens (.bin), or a folder that holds train.bin and val.bin.

    Text: files are read in sorted order, each distinct content once. A document, a file or a line of JSONL, goes to validation when the SHA-256
    of its content says so (5 % of documents), so it keeps its side when others come or go. Where that leaves either side with too little, which
    happens with a handful of documents, the last 5 % of every document are the validation text instead. Of one file of tokens the last 5 % are.
    `vocab` is the model's vocabulary. `folder` is where tokens of text are kept, and `report` where it is said: both are needed for text
    with a tokenizer.

    Raises DataError if the folder is missing or holds no text, a file cannot be read or is damaged, or the tokens do not fit into `vocab`.
    """
    if source != STDLIB and (paths := _token_files(root_of(source))):
        return _from_token_files(source, paths, token_dtype, tokenizer, vocab)
    paths = text_files(source)
    loaded = load_tokenizer(tokenizer)
    _require_room(loaded.name, loaded.vocab, vocab)
    if not isinstance(loaded, HuggingFace):
        return _in_memory(source, paths, field)
    assert folder is not None and report is not None, "text with a tokenizer is tokenized into a folder"
    return _from_tokenized(source, tokenize(Texts(root_of(source), paths, field, loaded), folder, report), loaded.vocab)


def needs_tokenizing(source: str, *, tokenizer: str, field: str, vocab: int | None, folder: Path) -> bool:
    """Whether load_corpus would write token files into `folder`. Reads no text. Raises DataError for sources and tokenizers as load_corpus."""
    if tokenizer == BYTES or (source != STDLIB and _token_files(root_of(source))):
        return False
    loaded = load_tokenizer(tokenizer)
    _require_room(loaded.name, loaded.vocab, vocab)
    assert isinstance(loaded, HuggingFace)
    return find_tokenized(Texts(root_of(source), text_files(source), field, loaded), folder) is None


def require_unchanged_files(corpus: Corpus) -> None:
    """Raises DataError if a file that the tokens are mapped from was written to since it was opened. Costs a system call a file."""
    for file in corpus.files:
        require_unchanged(file)


def _token_files(root: Path) -> list[Path]:
    """The one file of tokens, or those of the two sides; none if `root` is something else."""
    if root.is_dir():
        pair = [root / TRAIN, root / VALIDATION]
        return pair if all(path.is_file() for path in pair) else []
    return [root] if root.suffix == SUFFIX and root.is_file() else []


def _from_token_files(source: str, paths: list[Path], dtype: TokenDtype, tokenizer: str, vocab: int | None) -> Corpus:
    files = tuple(open_token_file(path, dtype) for path in paths)
    if tokenizer != BYTES:
        loaded = load_tokenizer(tokenizer)
        _require_room(loaded.name, loaded.vocab, vocab)
    for file in files:
        if vocab is not None and file.largest >= vocab:
            raise outside_vocabulary(file.largest, file.largest_at, str(file.path), vocab)
    digest = _combined([file.digest for file in files])
    if len(files) == 2:
        return Corpus(source, files[0].tokens, files[1].tokens, None, digest, f"{TRAIN} and {VALIDATION}", "token", vocab, files=files)
    tokens = files[0].tokens
    cut = len(tokens) - int(len(tokens) * VALIDATION_SHARE)
    return Corpus(source, tokens[:cut], tokens[cut:], None, digest, f"the last {VALIDATION_SHARE:.0%}", "token", vocab, files=files)


def _from_tokenized(source: str, made: Tokenized, vocab: int) -> Corpus:
    files = (open_token_file(made.train, made.dtype), open_token_file(made.validation, made.dtype))
    # made.digest is over every token as it was written; the sample sees what has become of the files since
    digest = _combined([made.digest, *(file.digest for file in files)])
    train, validation = (file.tokens for file in files)
    left_out, copies = num_left_out(source), made.num_copies
    return Corpus(source, train, validation, made.num_documents, digest, made.split, "token", vocab, made.num_replaced, files, left_out, copies)


def _in_memory(source: str, paths: list[Path], field: str) -> Corpus:
    copies: list[Path] = []
    found = [(document, b"".join(blocks(document, 0, document.num_bytes))) for document in documents(paths, field, copies.append)]
    if not found:
        raise no_text(source)
    to_validation = [document for document, _ in found if goes_to_validation(document.digest)]
    split = choose_split(
        num_documents=len(found),
        num_validation=len(to_validation),
        num_bytes=sum(document.num_bytes for document, _ in found),
        validation_bytes=sum(document.num_bytes for document in to_validation),
        name="documents" if any(path.suffix.lower() == JSONL for path in paths) else "files",
    )
    cuts = [(content, split.end_of_training(document.digest, len(content))) for document, content in found]
    train = b"".join(content[:cut] for content, cut in cuts)
    validation = b"".join(content[cut:] for content, cut in cuts)
    digest = hashlib.sha256(str(len(train)).encode() + b":" + train + validation).hexdigest()
    return Corpus(
        source,
        np.frombuffer(train, np.uint8),
        np.frombuffer(validation, np.uint8),
        len(found),
        digest,
        split.in_words,
        num_replaced=_num_replaced(found),
        num_left_out=num_left_out(source),
        num_copies=len(copies),
    )


def _num_replaced(found: list[tuple[Document, bytes]]) -> int:
    return sum(document.num_replaced for document, _ in found)


def _combined(digests: list[str]) -> str:
    return digests[0] if len(digests) == 1 else hashlib.sha256(":".join(digests).encode()).hexdigest()


def _require_room(name: str, tokens: int, vocab: int | None) -> None:
    if vocab is not None and tokens > vocab:
        raise DataError(
            f"data.tokenizer = {name!r} has {tokens:,} tokens and the model a vocabulary of {vocab:,}: the last ones would have no row in its "
            f"embedding. Set model.vocab (for model.kind 'hf', vocab_size in its config.json) to {tokens} or more, or choose the tokenizer that "
            "belongs to the model"
        )


def outside_vocabulary(token: int, place: int | None, where: str, vocab: int) -> DataError:
    """The error of a token that the model has no row for."""
    at = f" at place {place:,}" if place is not None else ""
    return DataError(
        f"token {token:,}{at} of {where} is outside the model's vocabulary of {vocab:,}; set model.vocab (for model.kind 'hf', vocab_size in "
        "its config.json) above the largest token, or data.token_dtype to what the file was written with, or choose the file that belongs to the "
        "model's tokenizer"
    )
