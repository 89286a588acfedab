import numpy as np
import pytest

from packhorse.data.masking import hide

pytestmark = pytest.mark.pure
T, MASK, VOCAB = 128, 1000, 500


def text(rows):
    ids = np.random.Generator(np.random.Philox(0)).integers(0, VOCAB, (rows, T))
    return ids, np.roll(ids, -1, 1)


def hidden(rows=400, seed=3, first=0, **options):
    ids, labels = text(rows)
    return ids, *hide(ids, labels, seed=seed, first=first, mask_token=MASK, vocab=VOCAB, **options)


def test_fifteen_per_cent_of_every_sample_and_eighty_ten_ten_of_those():
    ids, given, wanted = hidden()
    asked = wanted != -100
    assert (asked.sum(1) == 19).all()  # 0.15 * 128 = 19.2
    assert (wanted[asked] == ids[asked]).all() and (given[~asked] == ids[~asked]).all()
    masked, kept = given[asked] == MASK, given[asked] == ids[asked]
    # 7600 draws: three standard deviations are 0.014, 0.010, 0.010
    assert masked.mean() == pytest.approx(0.8, abs=0.014)
    assert kept.mean() == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.010)
    others = given[asked][~masked & ~kept]
    assert len(others) / asked.sum() == pytest.approx(0.1, abs=0.010) and len(set(others)) > VOCAB / 2 and others.max() < VOCAB


def test_every_place_is_asked_for_alike():
    asked = (hidden(4000)[2] != -100).mean(0)
    assert np.abs(asked - 19 / T).max() < 5 * np.sqrt(0.15 * 0.85 / 4000)


def test_a_sample_is_hidden_alike_however_the_step_is_cut():
    ids, labels = text(12)
    options = {"seed": 3, "mask_token": MASK, "vocab": VOCAB}
    whole = hide(ids, labels, first=60, **options)
    for size in (1, 4, 6):
        parts = [hide(ids[i : i + size], labels[i : i + size], first=60 + i, **options) for i in range(0, 12, size)]
        assert all(np.array_equal(np.concatenate(cut), one) for cut, one in zip(zip(*parts), whole))


def test_seed_sample_and_side_each_change_what_is_hidden():
    base = hidden(4)[2]
    same = np.tile(text(1)[0], (4, 1))
    rows = hide(same, same, seed=3, first=0, mask_token=MASK, vocab=VOCAB)[1]
    assert len({tuple(row != -100) for row in rows}) == 4
    assert not np.array_equal(base, hidden(4, seed=4)[2])
    assert not np.array_equal(base, hidden(4, first=4)[2])
    assert not np.array_equal(base, hidden(4, validation=True)[2])


def test_padding_is_left_alone_and_the_text_itself_unchanged():
    ids, labels = text(50)
    labels[:, 20:], ids[:, 20:] = -100, 0
    before = ids.copy()
    given, wanted = hide(ids, labels, seed=1, first=0, mask_token=MASK, vocab=VOCAB)
    assert (wanted[:, 20:] == -100).all() and (given[:, 20:] == 0).all()
    assert ((wanted != -100).sum(1) == 3).all()  # 0.15 * 20
    assert np.array_equal(ids, before)
