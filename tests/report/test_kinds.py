import pytest

from packhorse.report.kinds import stays, stays_on_host

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


def test_what_a_step_gives_back_and_what_kernels_use_besides(by_hand):
    text = """graph update
input %x: f32[64, 128] = batch "x"
%a: f32[64, 128] = aten.flip.default(%x, [0])  # update | | o.py:1
output %a = grad "w1"
"""
    (stay,) = stays(by_hand(update=text).programs["update"])
    assert (stay.kind, stay.offset, stay.lower, stay.upper) == ("output", None, 0, 1)


def test_where_saved_values_are_while_they_wait(parked):
    planned = parked().programs["first"]
    found = {s.name: (s.lower, s.upper, s.size, s.kind) for s in stays(planned)}
    assert found == {
        "h": (0, 4, 32768, "leaving"),
        "g": (1, 9, 32768, "leaving"),
        ".slice.h": (3, 14, 16384, "slice"),
        "k": (4, 10, 8192, "kept"),
        "e": (7, 10, 8192, "kept"),
        "d": (9, 19, 8192, "temporary"),
        ".fetched.g": (10, 17, 32768, "back"),
        ".whole.h": (12, 21, 32768, "back"),
        "dg": (18, 21, 32768, "temporary"),
        "dh": (20, 23, 32768, "temporary"),
    }
    assert [(s.name, s.lower, s.upper, s.size, s.offset, s.kind) for s in stays_on_host(planned)] == [(".host.g", 6, 12, 32768, 0, "on the host")]


def test_parameters_that_are_gathered_are_not_saved_values(by_hand):
    text = """graph first
input %x: f32[64, 64] = batch "x"
input %w1: f32[64, 128] = param "w1"
input %w2: f32[128, 32] = param "w2"
%.gathered.w: f32[16384] = packhorse.all_gather.default(%w1, axis="dp", ranks=2, rank=0, tag="gather w")  # forward | |
 = packhorse.wait.default(%w1, %.gathered.w, axis="dp", tag="gather w")  # forward | |
%a: f32[16384] = aten.gelu.default(%.gathered.w)  # forward | | m.py:1
%b: f32[16384] = aten.mul.Tensor(%a, %.gathered.w)  # backward | | m.py:1
"""
    assert {s.name: s.kind for s in stays(by_hand(text=text).programs["first"])} == {".gathered.w": "gathered", "a": "kept", "b": "temporary"}
