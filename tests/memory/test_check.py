from dataclasses import replace

import pytest

from packhorse.errors import CheckError
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.check import check_layout

pytestmark = pytest.mark.pure

# 24 |       bbb        a [0, 4), 10 bytes at 0, which take up 16
# 16 | aaaa  bbb        b [2, 6), 20 bytes at 16, which take up 24
#  0 | aaaa    ccc      c [4, 8), 16 bytes at 0; a ends when c begins, so they share bytes
# Live bytes: 16 in [0, 2), 40 in [2, 6), 16 in [6, 8).
BUFFERS = [Buffer("a", 0, 4, 10), Buffer("b", 2, 6, 20), Buffer("c", 4, 8, 16)]
LAYOUT = Layout({"a": 0, "b": 16, "c": 0}, height=40, lower_bound=40, alignment=8, method="by hand")


def with_offset(name, offset):
    return replace(LAYOUT, offsets={**LAYOUT.offsets, name: offset})


def test_a_right_layout_passes():
    check_layout(BUFFERS, LAYOUT)
    check_layout([], Layout({}, 0, 0, 64, "by hand"))
    check_layout([Buffer("nothing", 0, 3, 0), *BUFFERS], with_offset("nothing", 0))


def test_two_buffers_share_time_and_bytes():
    with pytest.raises(CheckError) as error:
        check_layout(BUFFERS, with_offset("b", 8))
    for part in ("'a'", "[0, 4)", "[0, 10)", "'b'", "[2, 6)", "[8, 28)"):
        assert part in str(error.value)


def test_one_shared_byte_is_enough():
    # d [0, 1) at byte 8 meets a, which ends at 10, in bytes 8 and 9; were a 9 bytes long it would be one byte, and with 8 none.
    beside = with_offset("d", 8)
    for size in (9, 10):
        with pytest.raises(CheckError, match=r"'a'.*'d'"):
            check_layout([Buffer("a", 0, 4, size), *BUFFERS[1:], Buffer("d", 0, 1, 8)], beside)
    # Live bytes: 8 + 8 in [0, 1), 8 + 24 in [2, 4), 24 + 16 in [4, 6).
    check_layout([Buffer("a", 0, 4, 8), *BUFFERS[1:], Buffer("d", 0, 1, 8)], beside)


def test_a_shared_instant_is_enough():
    later = [Buffer("a", 0, 5, 10), *BUFFERS[1:]]
    with pytest.raises(CheckError) as error:
        check_layout(later, LAYOUT)
    assert "buffer 'a' (alive [0, 5), bytes [0, 10)) overlaps buffer 'c' (alive [4, 8), bytes [0, 16))" in str(error.value)


def test_negative_offset():
    with pytest.raises(CheckError, match=r"'c'.*negative"):
        check_layout(BUFFERS, with_offset("c", -8))


def test_misaligned_offset():
    with pytest.raises(CheckError, match=r"'b'.*not a multiple of the alignment, 8"):
        check_layout(BUFFERS, with_offset("b", 20))


@pytest.mark.parametrize("height", [36, 48])
def test_wrong_height(height):
    with pytest.raises(CheckError, match=f"given as {height} bytes, but the highest buffer ends at 40"):
        check_layout(BUFFERS, replace(LAYOUT, height=height))


@pytest.mark.parametrize("bound", [30, 32, 48])
def test_wrong_lower_bound(bound):
    with pytest.raises(CheckError, match=f"lower bound is given as {bound} bytes, but the largest live set has 40"):
        check_layout(BUFFERS, replace(LAYOUT, lower_bound=bound))


def test_missing_offset():
    with pytest.raises(CheckError, match="'b' has no offset"):
        check_layout(BUFFERS, replace(LAYOUT, offsets={"a": 0, "c": 0}))


def test_offset_of_no_buffer():
    with pytest.raises(CheckError, match="'d'"):
        check_layout(BUFFERS, with_offset("d", 0))


def test_two_buffers_of_one_name():
    with pytest.raises(CheckError, match="share"):
        check_layout([*BUFFERS, Buffer("c", 9, 10, 8)], LAYOUT)
