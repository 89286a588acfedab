"""The words of a tensor plan: what is said of a module, and the dim that it cuts. No torch."""

import difflib
from dataclasses import dataclass
from typing import Any, Literal

from packhorse.errors import UserError


@dataclass(frozen=True)
class Style:
    """How a module is cut over the tp ranks (Shoeybi et al. 2019, section 3).

    "column": by outputs, each rank has some of them. "row": by inputs, each rank has a partial sum of all outputs; the bias is whole.
    "vocab": by the entries of the vocabulary. "whole": every rank has all of it.
    blocks: what the dim is made of (query, key and value in one matrix): so many equal blocks, or blocks of these sizes.
    """

    kind: Literal["column", "row", "vocab", "whole"]
    blocks: int | tuple[int, ...] = 1


_COLUMN, _ROW, _VOCAB, _WHOLE = Style("column"), Style("row"), Style("vocab"), Style("whole")
_OURS = {"column": _COLUMN, "row": _ROW, "vocab": _VOCAB, "whole": _WHOLE}
# Hugging Face's own words. Whether an output is gathered or an input is split follows from the graph, and so does which gradients are summed.
_THEIRS = {
    "colwise": _COLUMN,
    "colwise_gather_output": _COLUMN,
    "colwise_rep": _COLUMN,
    "rowwise": _ROW,
    "rowwise_split_input": _ROW,
    "rowwise_rep": _ROW,
    "packed_colwise": Style("column", 2),
    "packed_rowwise": Style("row", 2),
    "embedding_rowwise": _VOCAB,
    "all_reduce": _WHOLE,
    "local_params": _WHOLE,
    "mla_kv_a_proj": _WHOLE,
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
    "sequence_parallel": _WHOLE,
}
_WORDS = _OURS | _THEIRS


def style_of(said: Any, where: str) -> Style:
    """The style that a plan says at `where`: a word, or (word, number of equal blocks), or (word, sizes of the blocks).

    Raises UserError if it is none of these.
    """
    if isinstance(said, str) and said in _WORDS:
        return _WORDS[said]
    if isinstance(said, list | tuple) and len(said) == 2 and said[0] in ("column", "colwise", "row", "rowwise"):
        blocks = tuple(said[1]) if isinstance(said[1], list | tuple) else said[1]
        numbers = blocks if isinstance(blocks, tuple) else (blocks,)
        if numbers and all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
            return Style(_WORDS[said[0]].kind, blocks)
    close = difflib.get_close_matches(said, list(_WORDS), n=1, cutoff=0.5) if isinstance(said, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise UserError(
        f"{where} = {said!r} is no way to cut a module{hint}; expected 'column', 'row', 'vocab' or 'whole' (or Hugging Face's words for them), or "
        "('column', 3) or ('column', (q, k, v)) for outputs that are made of so many equal blocks, or of blocks of these sizes"
    )


def is_known(said: Any) -> bool:
    """Whether a plan of others says what is understood here."""
    return isinstance(said, str) and said in _WORDS
