"""Which text validates: about 5 % of it, by whole documents where that can be."""

from dataclasses import dataclass
from typing import Literal

Side = Literal["train", "validation"]

VALIDATION_SHARE = 0.05
# Outside this range the split by whole documents is too lopsided to be useful (few documents, or one very large one).
_USABLE_SHARE = (0.01, 0.25)


@dataclass(frozen=True)
class Split:
    """How the documents of a corpus are divided: whole by the digest of their content, or each by itself, its end for validation."""

    by_document: bool
    in_words: str

    def end_of_training(self, digest: bytes, length: int) -> int:
        """Of a document with this SHA-256 and `length`, [0, end) trains and [end, length) validates.

        A document keeps its side when others come or go.
        """
        if self.by_document:
            return 0 if goes_to_validation(digest) else length
        return length - int(length * VALIDATION_SHARE)


def goes_to_validation(digest: bytes) -> bool:
    """Whether the SHA-256 of a document's content puts it on the side of validation, as it does with 5 % of documents."""
    return int.from_bytes(digest[:4], "big") < int(VALIDATION_SHARE * 2**32)


def choose_split(*, num_documents: int, num_validation: int, num_bytes: int, validation_bytes: int, name: str) -> Split:
    """The split by whole documents if it gives validation between 1 % and 25 % of the bytes; `name` is what documents are called."""
    if _USABLE_SHARE[0] <= validation_bytes / num_bytes <= _USABLE_SHARE[1]:
        return Split(True, f"{num_validation} of {num_documents} {name}")
    return Split(False, f"the last {VALIDATION_SHARE:.0%} of each {name.removesuffix('s')}")
