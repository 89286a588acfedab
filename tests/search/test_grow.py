import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.search.grow import grown
from packhorse.search.search import doublings
from packhorse.search.strategy import FIGURES, Needs

pytestmark = pytest.mark.pure

NUMBER = st.integers(0, 10**6)


def needs(**figures):
    return Needs(**{name: figures.get(name, 0.0) for name in FIGURES})


@given(NUMBER, NUMBER, st.integers(2, 300))
def test_what_is_linear_is_found_again(fixed, slope, depth):
    """f(d) = fixed + slope d, from its values at 2 and 3 blocks."""
    short = {d: needs(seconds=fixed + slope * d, sent=2 * slope * d) for d in (2, 3)}
    found = grown(short, depth)
    assert found.seconds == pytest.approx(fixed + slope * depth) and found.sent == pytest.approx(2 * slope * depth)


@given(NUMBER, st.integers(1, 10**5), st.integers(0, 10**5), st.integers(3, 300))
def test_a_peak_that_changes_its_instant_is_not_missed(fixed, saved, working, depth):
    """The arena is the larger of what a short model shows (`fixed`: say the head, whatever the depth) and of what all blocks save and one works with.
    Grown from two depths it is never too low."""

    def arena(d):
        return max(fixed, saved * d + working)

    short = {d: needs(arena=arena(d), saved_bytes=saved * d) for d in (2, 3)}
    assert grown(short, depth).arena >= arena(depth) - 1e-6 * arena(depth)


def test_one_depth_is_taken_as_it_is():
    assert grown({4: needs(seconds=3.0)}, 4).seconds == 3.0


def test_doublings():
    assert doublings(64) == ((1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (64, 1))
    assert doublings(5) == ((1, 1), (2, 1), (4, 1))
