"""(seed, step) -> the windows of text that the step trains on. A pure function, so the position in the data is one integer.

B samples of a micro-batch, T tokens of a sample (seq_len), N tokens of the corpus.
"""

import numpy as np
import numpy.typing as npt

from packhorse.errors import DataError

Ids = npt.NDArray[np.int64]


def sample_micro_batch(
    tokens: npt.NDArray[np.uint8], *, seed: int, step: int, micro_batch: int, micro_batch_size: int, global_batch_size: int, seq_len: int
) -> tuple[Ids, Ids]:
    """Micro-batch number `micro_batch` of `step`: tokens (N,) -> ids (B, T), labels (B, T); labels are ids shifted by one token.

    The starts of the whole global batch are drawn from a counter-based generator at (seed, step), and a micro-batch is a slice of
    them: cutting the global batch into other micro-batches changes no sample. Samples are drawn with replacement.

    Raises DataError if the corpus is shorter than one sample and its label (N < T + 1).
    Source of the generator: Philox, Salmon et al. 2011 (SC11), as in numpy.
    """
    _require_tokens(tokens, seq_len, "training")
    # Philox counts upwards in the lowest word of the counter, so distinct steps, kept in the highest, never share a draw.
    generator = np.random.Generator(np.random.Philox(key=[seed, 0], counter=[0, 0, 0, step]))
    starts = generator.integers(0, len(tokens) - seq_len, size=global_batch_size)
    first = micro_batch * micro_batch_size
    return windows(tokens, starts[first : first + micro_batch_size], seq_len)


def validation_starts(tokens: npt.NDArray[np.uint8], num_samples: int, seq_len: int) -> Ids:
    """Starts (num_samples,) of samples spread evenly over tokens (N,); always the same ones, so that losses can be compared.

    Raises DataError if N < T + 1.
    """
    _require_tokens(tokens, seq_len, "validation")
    return np.linspace(0, len(tokens) - seq_len - 1, num_samples).astype(np.int64)


def windows(tokens: npt.NDArray[np.uint8], starts: Ids, seq_len: int) -> tuple[Ids, Ids]:
    """tokens (N,), starts (B,) -> ids (B, T), labels (B, T) in int64."""
    samples = tokens[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64)
    return np.ascontiguousarray(samples[:, :-1]), np.ascontiguousarray(samples[:, 1:])


def _require_tokens(tokens: npt.NDArray[np.uint8], seq_len: int, split: str) -> None:
    if len(tokens) < seq_len + 1:
        raise DataError(
            f"too little {split} text: {len(tokens)} bytes, expected at least data.seq_len + 1 = {seq_len + 1}; "
            "add text to data.corpus or lower data.seq_len"
        )
