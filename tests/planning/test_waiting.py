import pytest

from packhorse.graph.text import parse_graph
from packhorse.planning.plan import Options
from packhorse.planning.waiting import original, parked_as, tally, waiting_values

pytestmark = pytest.mark.pure
# %a 400 bytes cut in two; %b 800 on the host; %c 200 cut, and its slice on the host; %d 64 kept; %e 48 computed again; %f no backward node reads
TEXT = """graph first
input %x: f32[100] = batch "x"
%a: f32[100] = aten.gelu.default(%x)  # forward | a | m.py:1
%b: f32[200] = aten.cat.default([%a, %a])  # forward | b | m.py:2
%c: f32[50] = aten.one.default(%a)  # forward | c | m.py:3
%d: f32[16] = aten.two.default(%c)  # forward | d | m.py:4
%e: f32[12] = aten.three.default(%c)  # forward | e | m.py:5
%f: f32[12] = aten.gelu.default(%e)  # forward | f | m.py:6
%.gathered.w: f32[900] = packhorse.all_gather.default(%f, axis="dp", ranks=75, rank=0, tag="gather w")  # forward | |
 = packhorse.wait.default(%f, %.gathered.w, axis="dp", tag="gather w")  # forward | |
%.flat.a: f32[100] @a+0 = packhorse.views.default(%a)  # forward | a |
%.slice.a: f32[50] = packhorse.own_slice.default(%.flat.a, ranks=2, rank=0)  # forward | a |
%.flat.b: f32[200] @b+0 = packhorse.views.default(%b)  # forward | b |
%.host.b: f32[200] = packhorse.to_host.default(%.flat.b, axis="host", tag="to host b")  # forward | b |
 = packhorse.wait.default(%.flat.b, %.host.b, axis="host", tag="to host b")  # forward | |
%.flat.c: f32[50] @c+0 = packhorse.views.default(%c)  # forward | c |
%.slice.c: f32[25] = packhorse.own_slice.default(%.flat.c, ranks=2, rank=0)  # forward | c |
%.host.c: f32[25] = packhorse.to_host.default(%.slice.c, axis="host", tag="to host c")  # forward | c |
 = packhorse.wait.default(%.slice.c, %.host.c, axis="host", tag="to host c")  # forward | |
%g: f32[16] = aten.mul.Tensor(%d, %.gathered.w)  # backward | |
%.mirror1.e: f32[12] = aten.three.default(%d)  # recompute | e | m.py:5
%h: f32[12] = aten.mul.Tensor(%.mirror1.e, %g)  # backward | |
"""
NONE = TEXT[: TEXT.index("%.flat.a")]


def test_where_each_saved_value_waits():
    found = [(w.name, w.num_bytes, w.way, w.device_bytes, w.host_bytes, w.maker.module) for w in waiting_values(parse_graph(TEXT))]
    assert found == [
        ("b", 800, "on the host", 0, 800, "b"),
        ("a", 400, "slice", 200, 0, "a"),
        ("c", 200, "slice on the host", 0, 100, "c"),
        ("d", 64, "kept", 64, 0, "d"),
        ("e", 48, "computed again", 0, 0, "e"),
    ]


def test_numbers_and_words_of_the_program_that_parks_the_most():
    found = tally([parse_graph(NONE), parse_graph(TEXT)])
    assert found.to_dict() == {"sharded_values": 2, "sharded_bytes": 600, "offloaded_values": 2, "offloaded_bytes": 900}
    assert found.in_words(Options(residency="offload")) == (
        "residency (offload): 1 saved value of 400 B as slices of 200 B, 1 saved value of 800 B on the host, 1 saved value of 200 B as slices of "
        "100 B on the host, all others in place or computed again"
    )


def test_nobody_asked_and_nothing_waits_elsewhere():
    found = tally([parse_graph(NONE)])
    assert found.in_words(Options()) == found.in_words(Options(residency="keep")) == ""
    assert found.in_words(Options(host_budget="30%")) == "residency (auto): no saved value waits on the host or as a slice"
    assert found.to_dict() == {"sharded_values": 0, "sharded_bytes": 0, "offloaded_values": 0, "offloaded_bytes": 0}


def test_nothing_to_shard_is_said_with_why_that_is_normal():
    told = tally([parse_graph(NONE)]).in_words(Options(residency="shard"))
    assert told.startswith("residency (shard): nothing to shard: the tp ranks have no saved value alike; under sequence parallelism")
    # 4 bytes of 1028 are less than a hundredth
    little = """graph first
input %x: f32[256] = batch "x"
%a: f32[1] = aten.gelu.default(%x)  # forward | a | m.py:1
%k: f32[256] = aten.gelu.default(%x)  # forward | k | m.py:2
%.flat.a: f32[1] @a+0 = packhorse.views.default(%a)  # forward | a |
%.slice.a: f32[1] = packhorse.own_slice.default(%.flat.a, ranks=2, rank=0)  # forward | a |
%g: f32[256] = aten.gelu.default(%k)  # backward | |
"""
    assert "the tp ranks have no more than 1 of 2 saved values (4 B) alike" in tally([parse_graph(little)]).in_words(Options(residency="shard"))


def test_names_of_what_stands_for_a_saved_value():
    assert parked_as(".slice.x") == ("slice", "x") and parked_as(".whole..state.rng0") == ("whole", ".state.rng0")
    assert parked_as("slice.x") == ("", "slice.x") and parked_as(".gathered.w") == ("", ".gathered.w")


def test_the_value_that_a_mirror_repeats():
    assert [original(name) for name in ("y", ".mirror1.y", ".mirror12.mm_3", "mirror1.y", ".state.mirror1.y")] == [
        "y", "y", "mm_3", "mirror1.y", ".state.mirror1.y"
    ]  # fmt: skip
