import numpy as np
import pytest

from packhorse.data.sampling import sample_micro_batch, validation_starts, windows
from packhorse.errors import DataError

pytestmark = pytest.mark.pure

TOKENS = np.arange(251, dtype=np.uint8)  # token == position, so a sample shows where it was cut


def draw(step=0, seed=1, micro_batch=0, micro_batch_size=8, tokens=TOKENS, seq_len=16, global_batch_size=8):
    return sample_micro_batch(
        tokens,
        seed=seed,
        step=step,
        micro_batch=micro_batch,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
    )


def test_samples_are_runs_of_text_and_labels_are_the_next_byte():
    ids, labels = draw()
    assert ids.shape == labels.shape == (8, 16) and ids.dtype == labels.dtype == np.int64
    assert (labels == ids + 1).all()
    assert (np.diff(ids, axis=1) == 1).all()


def test_same_seed_and_step_same_samples_and_others_differ():
    first = draw(step=7)[0]
    assert (draw(step=7)[0] == first).all()
    assert (draw(step=8)[0] != first).any()
    assert (draw(step=7, seed=2)[0] != first).any()


def test_the_order_of_calls_does_not_matter():
    forwards = [draw(step=s)[0] for s in range(5)]
    backwards = [draw(step=s)[0] for s in reversed(range(5))][::-1]
    assert all((a == b).all() for a, b in zip(forwards, backwards, strict=True))


def test_cutting_the_global_batch_otherwise_changes_no_sample():
    whole = draw()[0]
    parts = [draw(micro_batch=i, micro_batch_size=2)[0] for i in range(4)]
    assert (np.concatenate(parts) == whole).all()


def test_every_position_can_be_drawn_and_none_beyond():
    starts = np.concatenate([draw(step=s, tokens=TOKENS[:20])[0][:, 0] for s in range(100)])
    assert set(starts) == {0, 1, 2, 3}  # N - T = 4 windows of 16 tokens and a label


def test_draws_are_uniform_and_uncorrelated_between_neighbouring_steps():
    num_tokens = 1016  # 1000 positions
    starts = np.stack([_starts(num_tokens, s) for s in range(500)])
    assert abs(starts.mean() - 499.5) < 6 * 289 / np.sqrt(starts.size)  # six standard errors of the mean
    assert abs(np.corrcoef(starts[:-1].ravel(), starts[1:].ravel())[0, 1]) < 6 / np.sqrt(starts.size)


def _starts(num_tokens, step):
    # Two corpora that hold the high and the low byte of each position give the start back.
    positions = np.arange(num_tokens)
    high, low = (positions // 256).astype(np.uint8), (positions % 256).astype(np.uint8)
    return draw(step=step, tokens=high)[0][:, 0] * 256 + draw(step=step, tokens=low)[0][:, 0]


def test_validation_starts_are_fixed_and_cover_the_text():
    starts = validation_starts(TOKENS, 5, 50)
    assert list(starts) == [0, 50, 100, 150, 200]  # 251 - 50 - 1 = 200 is the last start with a label for every token
    ids, labels = windows(TOKENS, starts, 50)
    assert labels.max() == 250 and (ids[:, 0] == starts).all()


def test_too_little_text():
    assert draw(tokens=TOKENS[:17])[0].shape == (8, 16)
    with pytest.raises(DataError, match=r"16 bytes.*seq_len \+ 1 = 17"):
        draw(tokens=TOKENS[:16])
    with pytest.raises(DataError, match="validation"):
        validation_starts(TOKENS[:3], 2, 16)
