import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.device.roofline import Products

pytestmark = pytest.mark.pure
PRODUCTS = Products(1e12, ((1e6, 0.1), (1e8, 0.5), (1e9, 0.8)))


@pytest.mark.parametrize(
    ("flops", "share"),
    [(1, 0.1), (1_000_000, 0.1), (10_000_000, 0.3), (100_000_000, 0.5), (10**9, 0.8), (10**15, 0.8)],  # 1e7 is half way between in log
)
def test_shares_between_entries_are_linear_in_the_logarithm(flops, share):
    assert PRODUCTS.share(flops) == pytest.approx(share)
    assert PRODUCTS.seconds(flops) == pytest.approx(flops / (1e12 * share))


@given(st.integers(1, 10**13), st.integers(1, 10**13))
def test_more_flops_never_take_less(a, b):
    small, large = sorted((a, b))
    assert PRODUCTS.seconds(small) <= PRODUCTS.seconds(large) * (1 + 1e-12)
