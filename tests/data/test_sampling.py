import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packhorse.data.permutation as permutation
from packhorse.data.sampling import IGNORED, samples, validation_starts, windows
from packhorse.errors import DataError

pytestmark = pytest.mark.pure

TOKENS = np.arange(251, dtype=np.uint8)  # token == position, so a sample shows where it was cut


def draw(step=0, seed=1, micro_batch=0, micro_batch_size=8, tokens=TOKENS, seq_len=16, global_batch_size=8, order="random"):
    return samples(
        tokens,
        order=order,
        seed=seed,
        first=step * global_batch_size + micro_batch * micro_batch_size,
        count=micro_batch_size,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
    )


def test_samples_are_runs_of_text_and_labels_are_the_next_byte():
    ids, labels = draw()
    assert ids.shape == labels.shape == (8, 16) and ids.dtype == labels.dtype == np.int64
    assert (labels == ids + 1).all()
    assert (np.diff(ids, axis=1) == 1).all()


def test_random_samples_are_those_of_earlier_versions():
    # The recipe that runs of earlier versions were drawn with: Philox keyed by the seed, the step in the counter's highest word.
    for seed, step in ((1, 0), (1, 7), (2, 1000)):
        starts = np.random.Generator(np.random.Philox(key=[seed, 0], counter=[0, 0, 0, step])).integers(0, 251 - 16, size=8)
        assert (draw(seed=seed, step=step)[0][:, 0] == starts).all()


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_same_seed_and_step_same_samples_and_others_differ(order):
    first = draw(step=7, order=order)[0]
    assert (draw(step=7, order=order)[0] == first).all()
    assert (draw(step=8, order=order)[0] != first).any()
    assert (draw(step=7, seed=2, order=order)[0] != first).any()


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_the_order_of_calls_does_not_matter(order):
    forwards = [draw(step=s, order=order)[0] for s in range(5)]
    backwards = [draw(step=s, order=order)[0] for s in reversed(range(5))][::-1]
    assert all((a == b).all() for a, b in zip(forwards, backwards, strict=True))


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_cutting_the_global_batch_otherwise_changes_no_sample(order):
    whole = draw(step=3, order=order)[0]
    parts = [draw(step=3, micro_batch=i, micro_batch_size=2, order=order)[0] for i in range(4)]
    assert (np.concatenate(parts) == whole).all()


def test_every_position_can_be_drawn_and_none_beyond():
    starts = np.concatenate([draw(step=s, tokens=TOKENS[:20])[0][:, 0] for s in range(100)])
    assert set(starts) == {0, 1, 2, 3}  # N - T = 4 windows of 16 tokens and a label


def test_draws_are_uniform_and_uncorrelated_between_neighbouring_steps():
    num_tokens = 1016  # 1000 positions
    tokens = np.arange(num_tokens, dtype=np.uint16)
    starts = np.stack([draw(step=s, tokens=tokens)[0][:, 0] for s in range(500)])
    assert abs(starts.mean() - 499.5) < 6 * 289 / np.sqrt(starts.size)  # six standard errors of the mean
    assert abs(np.corrcoef(starts[:-1].ravel(), starts[1:].ravel())[0, 1]) < 6 / np.sqrt(starts.size)


@settings(deadline=None)
@given(
    num_tokens=st.integers(2, 200),
    seq_len=st.integers(1, 12),
    micro_batch_size=st.integers(1, 5),
    num_micro_batches=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_an_epoch_predicts_every_token_but_the_first_exactly_once(num_tokens, seq_len, micro_batch_size, num_micro_batches, seed):
    seq_len = min(seq_len, num_tokens - 1)
    tokens = np.arange(num_tokens, dtype=np.uint16)
    global_batch_size = micro_batch_size * num_micro_batches
    num_windows = len(range(0, num_tokens - 1, seq_len))
    num_steps = -(-3 * num_windows // global_batch_size)  # past two ends of an epoch, wherever they fall in a step
    drawn = [
        draw(step, seed, m, micro_batch_size, tokens, seq_len, global_batch_size, "epochs")
        for step in range(num_steps)
        for m in range(num_micro_batches)
    ]
    ids, labels = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    assert ids.shape == labels.shape == (num_steps * global_batch_size, seq_len)
    for epoch in range(3):
        part = slice(epoch * num_windows, (epoch + 1) * num_windows)
        predicted = labels[part] != IGNORED
        assert Counter(labels[part][predicted].tolist()) == Counter(range(1, num_tokens))
        assert (ids[part][predicted] == labels[part][predicted] - 1).all() and (ids[part][~predicted] == 0).all()
        # what is filled up stands at the end of one window, after at least one label
        assert (np.diff(predicted.astype(int), axis=1) <= 0).all() and predicted[:, 0].all() and (~predicted.all(axis=1)).sum() <= 1


def test_each_epoch_has_an_order_of_its_own():
    orders = [tuple(draw(step=epoch, order="epochs", seq_len=10, micro_batch_size=25, global_batch_size=25)[0][:, 0]) for epoch in range(20)]
    assert len(set(orders)) == 20 and {tuple(sorted(order)) for order in orders} == {tuple(range(0, 250, 10))}


class CountedTokens:
    """Tokens that count how often and how many of them are looked at; as many as one likes, without being anywhere."""

    itemsize = 2

    def __init__(self, num_tokens):
        self.num_tokens, self.looked_at = num_tokens, 0

    def __len__(self):
        return self.num_tokens

    def __getitem__(self, places):
        assert places.min() >= 0 and places.max() < self.num_tokens
        self.looked_at += places.size
        return places % 50000


@pytest.mark.parametrize("order", ["random", "epochs"])
@pytest.mark.parametrize("num_tokens", [10**6, 10**12])
def test_a_late_step_costs_what_the_first_costs(order, num_tokens, monkeypatch):
    hashed = []
    original = permutation._hash
    monkeypatch.setattr(permutation, "_hash", lambda words: hashed.append(len(words)) or original(words))
    work = []
    for step in (0, 10**6, 10**9):
        tokens = CountedTokens(num_tokens)
        hashed.clear()
        started = time.perf_counter()
        draw(step=step, tokens=tokens, seq_len=128, micro_batch_size=32, global_batch_size=32, order=order)
        assert time.perf_counter() - started < 1  # well under a millisecond, in fact
        work.append((tokens.looked_at, sum(hashed)))
    # ids and labels of 32 windows; a Feistel network of 12 rounds for each, and now and then once more
    assert all(looked_at <= 2 * 32 * 129 for looked_at, _ in work)
    assert all(hashes <= 12 * 32 * 2 for _, hashes in work)


def test_at_the_last_step_of_an_epoch_and_in_the_next():
    # 250 predictions in windows of 10: 25 windows, and 8 a step: step 3 is the last window and the first seven of the next epoch.
    whole = [draw(step=s, order="epochs", seq_len=10)[0][:, 0] for s in range(7)]
    assert sorted(np.concatenate(whole)[:25]) == list(range(0, 250, 10)) == sorted(np.concatenate(whole)[25:50])


def test_validation_starts_are_fixed_and_cover_the_text():
    starts = validation_starts(TOKENS, 5, 50)
    assert list(starts) == [0, 50, 100, 150, 200]  # 251 - 50 - 1 = 200 is the last start with a label for every token
    ids, labels = windows(TOKENS, starts, 50)
    assert labels.max() == 250 and (ids[:, 0] == starts).all()


@pytest.mark.parametrize("order", ["random", "epochs"])
def test_too_little_text(order):
    assert draw(tokens=TOKENS[:17], order=order)[0].shape == (8, 16)
    with pytest.raises(DataError, match=r"16 bytes.*seq_len \+ 1 = 17"):
        draw(tokens=TOKENS[:16], order=order)
    with pytest.raises(DataError, match=r"16 tokens.*seq_len \+ 1 = 17"):
        draw(tokens=TOKENS[:16].astype(np.uint16), order=order)
    with pytest.raises(DataError, match="validation"):
        validation_starts(TOKENS[:3], 2, 16)
