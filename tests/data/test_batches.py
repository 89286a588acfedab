import os

import numpy as np
import pytest

from packhorse.data import load_corpus, training_samples, validation_samples
from packhorse.errors import DataError

pytestmark = pytest.mark.pure


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(10_000, dtype="<u2").tofile(path)
    return path


def draw(corpus, order="random", first=0):
    return training_samples(corpus, order=order, seed=1, first=first, count=4, global_batch_size=4, seq_len=50)


def test_samples_come_from_their_own_side(path):
    corpus = load_corpus(str(path))
    for order in ("random", "epochs"):
        ids, labels = draw(corpus, order)
        assert ids.shape == labels.shape == (4, 50) and labels.max() < 9500  # 95 %
    ids, labels = validation_samples(corpus, 3, 50)
    assert ids.min() == 9500 and labels.max() == 9999


def test_a_token_outside_the_vocabulary_is_caught_in_the_batch_that_has_it(tmp_path):
    # In a file of 8 MiB the largest token lies where the sample of blocks does not look.
    path = tmp_path / "large.bin"
    tokens = np.ones(4 * 2**20, "<u2")
    tokens[100_000:100_100] = 700
    tokens.tofile(path)
    corpus = load_corpus(str(path), vocab=700)

    def epoch():
        return training_samples(corpus, order="epochs", seed=1, first=0, count=80, global_batch_size=80, seq_len=50_000)

    with pytest.raises(DataError, match=r"token 700 .*outside the model's vocabulary of 700.*model\.vocab.*data\.token_dtype"):
        epoch()
    corpus = load_corpus(str(path), vocab=701)
    assert epoch()[0].max() == 700


@pytest.mark.parametrize("take", [draw, lambda corpus: validation_samples(corpus, 2, 50)])
def test_a_file_that_changes_under_a_run_is_caught(path, take):
    corpus = load_corpus(str(path))
    take(corpus)
    os.truncate(path, 5000)
    with pytest.raises(DataError, match="changed while it was being read"):
        take(corpus)
