import pytest

from packhorse.report.kinds import original, stays

pytestmark = pytest.mark.pure


def test_every_tensor_with_its_times_bytes_and_kind(by_hand):
    found = {s.name: (s.lower, s.upper, s.size, s.offset is None, s.kind) for s in stays(by_hand().programs["first"])}
    assert found == {
        "h1": (0, 2, 32768, False, "temporary"),
        "g1": (1, 3, 32768, False, "temporary"),
        "h2": (2, 5, 8192, False, "kept"),
        "e": (3, 5, 8192, True, "kept"),
        "d2": (4, 11, 8192, False, "temporary"),
        ".mirror1.h1": (5, 12, 32768, False, "recomputed"),
        ".mirror1.g1": (6, 9, 32768, False, "recomputed"),
        "dg": (10, 12, 32768, False, "temporary"),
        "dh": (11, 14, 32768, False, "temporary"),
    }


def test_a_storage_taken_over_is_one_stay_for_each_value(by_hand):
    found = {s.name: (s.lower, s.upper, s.offset, s.kind) for s in stays(by_hand(in_place=True).programs["first"])}
    place = found["h1"][2]
    assert found["h1"] == (0, 1, place, "temporary") and found["g1"] == (1, 3, place, "temporary")
    assert found["h2"][:2] == (2, 4) and found["h2"][3] == "kept" and found["d2"][:2] == (4, 11) and found["d2"][3] == "temporary"
    assert found["h2"][2] == found["d2"][2]


def test_the_value_that_a_mirror_repeats():
    assert [original(name) for name in ("y", ".mirror1.y", ".mirror12.mm_3", "mirror1.y", ".state.mirror1.y")] == [
        "y", "y", "mm_3", "mirror1.y", ".state.mirror1.y"
    ]  # fmt: skip


def test_what_a_step_gives_back_and_what_kernels_use_besides(by_hand):
    text = """graph update
input %x: f32[64, 128] = batch "x"
%a: f32[64, 128] = aten.flip.default(%x, [0])  # update | | o.py:1
output %a = grad "w1"
"""
    (stay,) = stays(by_hand(update=text).programs["update"])
    assert (stay.kind, stay.offset, stay.lower, stay.upper) == ("output", None, 0, 1)
