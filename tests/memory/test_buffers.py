import pytest

from packhorse.errors import UserError
from packhorse.memory.buffers import Buffer, Layout

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("lower, upper", [(3, 3), (4, 3)])
def test_an_empty_lifespan_is_refused(lower, upper):
    with pytest.raises(UserError, match=rf"'x'.*\[{lower}, {upper}\) is empty"):
        Buffer("x", lower, upper, 8)


def test_a_negative_size_is_refused():
    with pytest.raises(UserError, match=r"'x'.*-1 bytes"):
        Buffer("x", 0, 1, -1)


def test_lifespans_are_half_open():
    a = Buffer("a", 0, 3, 1)
    assert a.overlaps(Buffer("b", 2, 3, 1))
    assert not a.overlaps(Buffer("b", 3, 4, 1))
    assert not Buffer("b", 3, 4, 1).overlaps(a)


def test_fragmentation_is_what_the_bound_leaves_over():
    assert Layout({"a": 0}, height=96, lower_bound=64, alignment=32, method="by hand").fragmentation == 32
