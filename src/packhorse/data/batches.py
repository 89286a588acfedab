"""A corpus -> samples of a step and of an evaluation, checked against the vocabulary and against changes of the files."""

import numpy as np

from packhorse.data.corpus import Corpus, outside_vocabulary, require_unchanged_files
from packhorse.data.sampling import Ids, Order, samples, validation_starts, windows


def training_samples(corpus: Corpus, *, order: Order, seed: int, first: int, count: int, global_batch_size: int, seq_len: int) -> tuple[Ids, Ids]:
    """Samples [first, first + count) of a run, counted from its first step on -> ids (count, T), labels (count, T), as `samples`.

    Raises DataError if there are too few tokens, a file of them has changed, or one lies outside the vocabulary.
    """
    require_unchanged_files(corpus)
    ids, labels = samples(corpus.train, order=order, seed=seed, first=first, count=count, global_batch_size=global_batch_size, seq_len=seq_len)
    _require_known(corpus, ids, labels)
    return ids, labels


def validation_samples(corpus: Corpus, num_samples: int, seq_len: int) -> tuple[Ids, Ids]:
    """ids (num_samples, T), labels (num_samples, T) spread evenly over the validation tokens, always the same. Raises as training_samples."""
    require_unchanged_files(corpus)
    ids, labels = windows(corpus.validation, validation_starts(corpus.validation, num_samples, seq_len), seq_len)
    _require_known(corpus, ids, labels)
    return ids, labels


def _require_known(corpus: Corpus, ids: Ids, labels: Ids) -> None:
    largest = max(int(np.max(ids)), int(np.max(labels)))
    if corpus.vocab is not None and largest >= corpus.vocab:
        raise outside_vocabulary(largest, None, corpus.name, corpus.vocab)
