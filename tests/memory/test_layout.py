import subprocess
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.layout_problems import buffer_lists, lowest_height, most_alive, tiling
from packhorse.bench.layout import step_like
from packhorse.errors import UserError
from packhorse.memory.bounds import lower_bound
from packhorse.memory.buffers import Buffer
from packhorse.memory.check import check_layout
from packhorse.memory.layout import greedy_layout, lay_out, lay_out_around

pytestmark = pytest.mark.pure

# 64 bytes are alive at every instant, yet no layout is 64 bytes high:
#
#   time     0  1  2  3  4        In 64 bytes p and q fill the arena at time 0, so each is one half of it, and so are r and s
#   p 32     #  .  .  .  .        at time 4. While q stands, a and c must lie in p's half; when it ends, b and d take q's half.
#   q 32     #  #  .  .  .        At time 3 r has its half and c, d share the other. But c lies in p's half and d in q's.
#   a 16     .  #  #  .  .
#   c 16     .  #  #  #  .        With 16 bytes more: p 0, q 32, c 0, a 16, b 32, d 64, r 32 (between c and d), s 0; d ends at 80.
#   b 16     .  .  #  .  .        All sizes are multiples of 16, so 80 is the next height after 64.
#   d 16     .  .  #  #  .
#   r 32     .  .  .  #  #
#   s 32     .  .  .  .  #
CROSSED = [
    Buffer("p", 0, 1, 32),
    Buffer("q", 0, 2, 32),
    Buffer("a", 1, 3, 16),
    Buffer("c", 1, 4, 16),
    Buffer("b", 2, 3, 16),
    Buffer("d", 2, 4, 16),
    Buffer("r", 3, 5, 32),
    Buffer("s", 4, 5, 32),
]


def test_best_height_above_the_lower_bound():
    layout = lay_out(CROSSED, alignment=16, time_limit_s=60)
    check_layout(CROSSED, layout)
    assert (layout.lower_bound, layout.height, layout.fragmentation) == (64, 80, 16)


def test_the_best_height_is_proven_so_the_time_is_not_used_up():
    begin = time.monotonic()
    lay_out(CROSSED, alignment=16, time_limit_s=3600)
    assert time.monotonic() - begin < 600


def test_five_buffers_by_hand():
    # e is alive throughout and lies at 0; c at 4; a and then b at 8, ending at 12; d, when only e is left, at 4, ending at 10.
    # Alive: a c e of 12 bytes, then b c e of 12, then d e of 10.
    buffers = [Buffer("a", 0, 3, 4), Buffer("b", 3, 9, 4), Buffer("c", 0, 9, 4), Buffer("d", 9, 21, 6), Buffer("e", 0, 21, 4)]
    layout = lay_out(buffers, alignment=2)
    check_layout(buffers, layout)
    assert layout.height == layout.lower_bound == 12


@settings(max_examples=60, deadline=None)
@given(buffer_lists(max_buffers=5), st.sampled_from([1, 2]))
def test_it_finds_the_best_height_of_small_problems(buffers, num_workers):
    layout = lay_out(buffers, alignment=1, time_limit_s=60, num_workers=num_workers)
    check_layout(buffers, layout)
    assert layout.height == lowest_height(buffers)
    assert layout.lower_bound == most_alive(buffers, 1)


@settings(max_examples=40, deadline=None)
@given(buffer_lists(max_buffers=30, max_time=20, max_size=300), st.sampled_from([1, 8, 64]), st.sampled_from([0.0, 0.2]))
def test_any_time_limit_gives_a_valid_layout(buffers, alignment, time_limit_s):
    layout = lay_out(buffers, alignment=alignment, time_limit_s=time_limit_s)
    check_layout(buffers, layout)
    assert layout.height >= most_alive(buffers, alignment)
    assert layout.height <= greedy_layout(buffers, alignment, deadline=0).height
    check_layout(buffers, greedy_layout(buffers, alignment))


def test_a_capacity_ends_the_search():
    # Any layout of CROSSED is within 256 bytes, so the first fast placement is kept; within 80 the best is.
    first = greedy_layout(CROSSED, 16, goal=256)
    assert lay_out(CROSSED, alignment=16, capacity=256) == first
    assert lay_out(CROSSED, alignment=16, capacity=80, time_limit_s=60).height == 80
    # Out of reach: the best there is comes back, and it is for the caller to refuse it.
    assert lay_out(CROSSED, alignment=16, capacity=70, time_limit_s=60).height == 80
    assert lay_out(CROSSED, alignment=16, capacity=0, time_limit_s=60).height == 80


def test_the_search_takes_over_where_the_fast_placements_miss():
    buffers, _ = tiling(seed=2, num_tiles=400, height=512, length=512)
    greedy = greedy_layout(buffers, 1)
    assert greedy.height > 512
    layout = lay_out(buffers, alignment=1, time_limit_s=300)
    check_layout(buffers, layout)
    assert (layout.height, layout.lower_bound, layout.method) == (512, 512, "solver")
    # Whatever is good enough ends it: here the first fast placement, here the best of them.
    first = greedy_layout(buffers, 1, deadline=0)
    assert first.height > greedy.height
    assert lay_out(buffers, alignment=1, capacity=first.height) == first
    assert lay_out(buffers, alignment=1, capacity=greedy.height).method == greedy.method
    assert lay_out(buffers, alignment=1, time_limit_s=0) == first


def test_a_step_of_5000_buffers_has_no_fragmentation():
    buffers = step_like(100, seed=0)
    assert len(buffers) == 5000
    # All saved values and the two buffers of the loss are alive together; step_like says why no more is needed.
    saved = sum(b.size for b in buffers if ".saved" in b.name)
    loss = next(b.size for b in buffers if b.name == "loss0")
    layout = lay_out(buffers, alignment=64, time_limit_s=300)
    check_layout(buffers, layout)
    assert layout.lower_bound == saved + 2 * loss
    assert layout.fragmentation == 0


def test_nothing_to_lay_out():
    assert lay_out([]).offsets == {}
    assert lay_out([]).height == lay_out([]).lower_bound == 0
    nothing = [Buffer("a", 0, 1, 0), Buffer("b", 0, 1, 0)]
    layout = lay_out(nothing)
    check_layout(nothing, layout)
    assert layout.height == 0


def test_default_alignment():
    buffers = [Buffer("a", 0, 2, 1), Buffer("b", 1, 3, 65)]
    layout = lay_out(buffers)
    check_layout(buffers, layout)
    assert layout.alignment == 64
    assert layout.height == layout.lower_bound == 64 + 128


@pytest.mark.parametrize(
    "arguments, what",
    [
        ({"alignment": 0}, "alignment=0"),
        ({"time_limit_s": -1.0}, "time_limit_s=-1.0"),
        ({"capacity": -1}, "capacity=-1"),
        ({"num_workers": 0}, "num_workers=0"),
    ],
)
def test_bad_arguments(arguments, what):
    with pytest.raises(UserError, match=what):
        lay_out([Buffer("a", 0, 1, 1)], **arguments)


def test_repeated_names():
    with pytest.raises(UserError, match="'a'"):
        lay_out([Buffer("a", 0, 1, 1), Buffer("a", 1, 2, 1)])


def test_no_torch():
    modules = "packhorse.memory.layout, packhorse.memory.check, packhorse.memory.instances, packhorse.bench.layout"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


@given(buffers=buffer_lists(max_buffers=6), taken=buffer_lists(max_buffers=3), data=st.data())
def test_around_what_lies_there(buffers, taken, data):
    """Beside buffers at given offsets: valid, no lower than what is alive at once, and no higher than with all of them above."""
    fixed, end = [], 0
    for number, buffer in enumerate(taken):  # with gaps below them, one above the other
        at = end + data.draw(st.integers(0, 4))
        fixed.append((replace(buffer, name=f"fixed {number}"), at))
        end = at + buffer.size
    layout = lay_out_around(fixed, buffers, alignment=1)
    everything = [*buffers, *(buffer for buffer, _ in fixed)]
    offsets = layout.offsets | {buffer.name: offset for buffer, offset in fixed}
    check_layout(everything, replace(layout, offsets=offsets, lower_bound=lower_bound(everything, 1)))
    assert lower_bound(everything, 1) <= layout.lower_bound <= layout.height <= end + lay_out(buffers, alignment=1).height


def test_around_what_lies_there_by_hand():
    """Ten bytes lie at 0 in the second half: what ends before goes beneath, what does not above; nothing lower is left for two buffers of six."""
    fixed = [(Buffer("fixed", 2, 4, 10), 0)]
    below, over, pair = Buffer("below", 0, 2, 10), Buffer("over", 0, 4, 3), [Buffer("a", 2, 4, 6), Buffer("b", 2, 4, 6)]
    assert lay_out_around(fixed, [below], alignment=1).offsets == {"below": 0}
    assert lay_out_around(fixed, [below, over], alignment=1).offsets == {"below": 0, "over": 10}
    assert lay_out_around(fixed, pair, alignment=1).height == 22


def test_above_what_lies_there_where_the_fast_placements_around_it_miss():
    """Ten bytes lie at 0 all the time; tiles that fill 64 bytes go above them, by the methods that do not know of what lies there."""
    buffers, _ = tiling(seed=1, num_tiles=60, height=64, length=64)
    fixed = Buffer("fixed", 0, 64, 10)
    layout = lay_out_around([(fixed, 0)], buffers, alignment=1)
    assert (layout.height, layout.lower_bound, layout.method) == (74, 74, "above")
    check_layout([*buffers, fixed], replace(layout, offsets=layout.offsets | {"fixed": 0}))
