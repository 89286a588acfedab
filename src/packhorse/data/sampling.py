"""Number of a sample -> its window of tokens. A pure function of (seed, number), so the position in the data is one integer.

B samples, T tokens of a sample (seq_len), N tokens of the corpus, G samples of a step (global batch). Samples are numbered over the whole run:
step s, from 0, trains on [s G, (s + 1) G), however they are cut into micro-batches or shared out.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from packhorse.data.permutation import permuted, round_keys
from packhorse.data.token_file import Tokens
from packhorse.errors import DataError

Ids = npt.NDArray[np.int64]
Order = Literal["random", "epochs"]

# A label that takes no part in the loss: ignore_index of torch.nn.functional.cross_entropy.
IGNORED = -100


def samples(tokens: Tokens, *, order: Order, seed: int, first: int, count: int, global_batch_size: int, seq_len: int) -> tuple[Ids, Ids]:
    """Samples [first, first + count) of tokens (N,)  ->  ids (B, T), labels (B, T), labels being ids shifted by one token. B = count.

    "random": starts drawn with replacement. The samples asked for must belong to one step.
    "epochs": window i predicts tokens i T + 1 .. (i + 1) T. An epoch has each of the W = ceil((N - 1) / T) windows once, in an order of its
    own; sample n is number n mod W of epoch n // W, so an epoch may end, and the next begin, within a step. Every token is predicted once an
    epoch, but the very first, which nothing precedes. The last window may be shorter: its labels are filled up with -100, which the loss leaves
    out, and its ids with 0. (A micro-batch's loss is a mean over its own labels, so those of the short window weigh a little more.)

    Raises DataError if the corpus is shorter than one sample and its label (N < T + 1).
    """
    _require_tokens(tokens, seq_len, "training")
    if order == "epochs":
        return _shuffled_windows(tokens, seed, first, count, seq_len)
    step, place = divmod(first, global_batch_size)
    assert place + count <= global_batch_size, "random samples are drawn a step at a time"
    return windows(tokens, random_starts(len(tokens), seed, step, global_batch_size, seq_len)[place : place + count], seq_len)


def random_starts(num_tokens: int, seed: int, step: int, global_batch_size: int, seq_len: int) -> Ids:
    """Starts (G,) of the windows of a step, uniform over those with a label for every token.

    Source of the generator: Philox, Salmon et al. 2011 (SC11), as in numpy.
    """
    # Philox counts upwards in the lowest word of the counter, so distinct steps, kept in the highest, never share a draw.
    generator = np.random.Generator(np.random.Philox(key=[seed, 0], counter=[0, 0, 0, step]))
    return generator.integers(0, num_tokens - seq_len, size=global_batch_size)


def shuffled(first: int, count: int, num_windows: int, seed: int) -> Ids:
    """Windows (count,) of samples [first, first + count) in order "epochs". Costs the same at any `first`."""
    found = np.empty(count, np.int64)
    done = 0
    while done < count:
        epoch, place = divmod(first + done, num_windows)
        here = min(count - done, num_windows - place)
        found[done : done + here] = permuted(np.arange(place, place + here), num_windows, round_keys(seed, epoch))
        done += here
    return found


def validation_starts(tokens: Tokens, num_samples: int, seq_len: int) -> Ids:
    """Starts (num_samples,) of samples spread evenly over tokens (N,); always the same ones, so that losses can be compared.

    Raises DataError if N < T + 1.
    """
    _require_tokens(tokens, seq_len, "validation")
    return np.linspace(0, len(tokens) - seq_len - 1, num_samples).astype(np.int64)


def windows(tokens: Tokens, starts: Ids, seq_len: int) -> tuple[Ids, Ids]:
    """tokens (N,), starts (B,) -> ids (B, T), labels (B, T) in int64."""
    cut = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return np.ascontiguousarray(cut[:, :-1]), np.ascontiguousarray(cut[:, 1:])


def _shuffled_windows(tokens: Tokens, seed: int, first: int, count: int, seq_len: int) -> tuple[Ids, Ids]:
    num_windows = -(-(len(tokens) - 1) // seq_len)
    places = shuffled(first, count, num_windows, seed)[:, None] * seq_len + np.arange(seq_len)
    there = places < len(tokens) - 1
    within = np.where(there, places, 0)
    ids = np.where(there, tokens[within].astype(np.int64), 0)
    return ids, np.where(there, tokens[within + 1].astype(np.int64), IGNORED)


def _require_tokens(tokens: Tokens, seq_len: int, split: str) -> None:
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"too little {split} text: {len(tokens)} {'bytes' if tokens.itemsize == 1 else 'tokens'}, expected at least data.seq_len + 1 = "
            f"{seq_len + 1}; add text to data.corpus or lower data.seq_len"
        )
