import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.search.grow import Grown
from packhorse.search.search import doublings
from packhorse.search.strategy import FIGURES, Needs

pytestmark = pytest.mark.pure

NUMBER = st.integers(0, 10**6)


def needs(**figures):
    return Needs(**{name: figures.get(name, 0.0) for name in FIGURES})


@given(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER), st.integers(2, 200), st.integers(1, 64))
def test_what_is_linear_in_both_is_found_again(terms, depth, samples):
    """f(d, b) = w + x d + y b + z d b, from its values at 2 and 3 blocks and 1 and 2 samples."""

    def f(d, b):
        w, x, y, z = terms
        return w + x * d + y * b + z * d * b

    corners = {(d, b): needs(seconds=f(d, b), sent=2 * f(d, b)) for d in (2, 3) for b in (1, 2)}
    grown = Grown(corners).at(depth, samples)
    assert grown.seconds == pytest.approx(f(depth, samples)) and grown.sent == pytest.approx(2 * f(depth, samples))


@given(NUMBER, st.integers(1, 10**5), st.integers(0, 10**5), st.integers(3, 300))
def test_a_peak_that_changes_its_instant_is_not_missed(fixed, saved, working, depth):
    """The arena is the larger of what a short model shows (`fixed`: say the head, whatever the depth) and of what all blocks save plus one block's work.
    Grown from two depths it is never too low."""

    def arena(d):
        return max(fixed, saved * d + working)

    corners = {(d, 1): needs(arena=arena(d), saved_bytes=saved * d) for d in (2, 3)}
    assert Grown(corners).at(depth, 1).arena >= arena(depth) - 1e-6 * arena(depth)


def test_one_depth_and_one_batch_are_taken_as_they_are():
    assert Grown({(4, 8): needs(seconds=3.0)}).at(4, 8).seconds == 3.0


def test_doublings():
    assert doublings(64) == ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1))
    assert doublings(5) == ((1, 1), (2, 1), (4, 1))
