"""Text -> token numbers and back: bytes, or a tokenizer.json of Hugging Face through the library `tokenizers`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from packhorse.errors import DataError

BYTES = "bytes"
_FILE = "tokenizer.json"
# Names of the token that ends a text, for a tokenizer.json that lies alone: nothing in that file says which token it is.
_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot|>", "[EOS]", "[SEP]")


class Tokenizer(Protocol):
    """Token numbers lie in [0, vocab). `end_of_text` is the one put between documents, None if there is none."""

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def end_of_text(self) -> int | None: ...

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text; nothing is put before or after them, and nothing is cut off."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens -> text. Bytes that are no UTF-8 become U+FFFD; tokens that mean no text are left out."""
        ...


@dataclass(frozen=True)
class Bytes:
    """A token is a byte of UTF-8. Documents follow each other with nothing between them."""

    name: str = BYTES
    vocab: int = 256
    end_of_text: int | None = None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode("utf-8")) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


@dataclass(frozen=True)
class HuggingFace:
    """The tokenizer of a tokenizer.json. `digest` is the SHA-256 of that file."""

    name: str
    vocab: int
    end_of_text: int | None
    digest: str
    library: Any

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self.library.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.library.decode(list(ids)))


def load_tokenizer(name: str) -> Bytes | HuggingFace:
    """The tokenizer of data.tokenizer = `name`: "bytes", a tokenizer.json, or the folder that holds one.

    Which token ends a text is looked up beside it, in tokenizer_config.json (eos_token), then config.json (eos_token_id), then among the
    special tokens by the usual names. A cut or a padding that tokenizer.json asks for is left out: it would lose text.
    Raises DataError if there is no such file, it is damaged, or the library is not installed.
    """
    if name == BYTES:
        return Bytes()
    path = Path(name).expanduser()
    path = path / _FILE if path.is_dir() else path
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"data.tokenizer = {name!r}: cannot read {path}: {error.strerror}; give a {_FILE} of Hugging Face, the folder that holds one, "
            f"or {BYTES!r}. Nothing is downloaded"
        ) from error
    try:
        from tokenizers import Tokenizer as Library
    except ImportError as error:
        raise DataError(
            f"data.tokenizer = {name!r} needs the library tokenizers, which is not installed ({error}); "
            f"install it with: pip install 'packhorse[hf]', or set data.tokenizer to {BYTES!r}"
        ) from error
    try:
        library = Library.from_str(raw.decode("utf-8"))
    except Exception as error:  # the library raises nothing more special
        raise DataError(
            f"data.tokenizer = {name!r}: {path} is no tokenizer that the library tokenizers can read: {error}; "
            "expected a tokenizer.json as save_pretrained writes it. Get a whole copy, or update the library"
        ) from error
    library.no_truncation()
    library.no_padding()
    numbers = library.get_vocab(with_added_tokens=True)
    if not numbers:
        raise DataError(f"data.tokenizer = {name!r}: {path} has no tokens; expected a trained tokenizer")
    return HuggingFace(name, max(numbers.values()) + 1, _end_of_text(path.parent, library, numbers), hashlib.sha256(raw).hexdigest(), library)


def _end_of_text(folder: Path, library: Any, numbers: dict[str, int]) -> int | None:
    named = _beside(folder / "tokenizer_config.json").get("eos_token")
    named = named.get("content") if isinstance(named, dict) else named
    if isinstance(named, str) and named in numbers:
        return numbers[named]
    number = _beside(folder / "config.json").get("eos_token_id")
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(number, int) and number in numbers.values():
        return number
    special = {token.content: number for number, token in library.get_added_tokens_decoder().items() if token.special}
    return next((special[name] for name in _END_NAMES if name in special), None)


def _beside(path: Path) -> dict[str, Any]:
    """The object in a JSON file that may be missing. Raises DataError if it is there and damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"cannot read {path}, which may say what token ends a text: {error.strerror}; make it readable or take it away") from error
    except ValueError as error:
        raise DataError(f"{path}, which may say what token ends a text, is no JSON: {error}; get a whole copy or take it away") from error
    return found if isinstance(found, dict) else {}
