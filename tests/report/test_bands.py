import pytest

from packhorse.report.bands import alive_bytes, bands_at, most_of_bands, peak_instant, persistent_bands
from packhorse.report.kinds import stays

pytestmark = pytest.mark.pure
PERSISTENT = 2 * (32768 + 16384)


def test_bytes_alive_at_each_time(by_hand):
    expected = [32768, 65536, 40960, 16384, 24576, 40960, 73728, 73728, 73728, 40960, 73728, 98304, 32768, 32768]
    assert alive_bytes(stays(by_hand().programs["first"]), 14) == expected


def test_the_peak_instant_and_what_is_alive_then(by_hand):
    plan = by_hand()
    instant = peak_instant(plan)
    assert (instant.program, instant.time, instant.num_bytes) == ("first", 11, PERSISTENT + 98304)
    assert [(s.name, s.size) for s in instant.alive] == [(".mirror1.h1", 32768), ("dg", 32768), ("dh", 32768)]
    # the external %e is dead by then, and yet reserved for
    assert plan.peak_bytes == instant.num_bytes + 8192
    bands = {name: num_bytes for name, num_bytes in bands_at(instant, plan.persistent).items() if num_bytes}
    assert bands == {"parameters": 49152, "gradients": 49152, "recomputed": 32768, "temporary": 65536}


def test_a_kernels_own_tensors_are_bands_of_their_own(by_hand):
    text = """graph first
input %x: f32[64, 64] = batch "x"
input %w1: f32[64, 128] = param "w1"
input %w2: f32[128, 32] = param "w2"
%e: f32[64, 128] = aten.flip.default(%w1, [0])  # forward | a | m.py:1
%f: f32[64, 128] = aten.gelu.default(%e)  # backward | a | m.py:1
output %f = grad "w1"
"""
    plan = by_hand(text=text)
    bands = bands_at(peak_instant(plan), plan.persistent)
    assert bands["external kept"] == 32768 and bands["kept"] == 0 and sum(bands.values()) == PERSISTENT + 32768


def test_the_most_of_each_band_at_any_time(by_hand):
    most = {name: num_bytes for name, num_bytes in most_of_bands(by_hand()).items() if num_bytes}
    # temporaries: at times 1 and 11 two of 32768 (with %h1 and %g1, %dg and %dh)
    expected = {"kept": 8192, "external kept": 8192, "recomputed": 65536, "temporary": 65536}
    assert most == {"parameters": 49152, "gradients": 49152} | expected


def test_what_is_neither_parameter_gradient_nor_state_is_other(by_hand):
    bands = persistent_bands(by_hand().persistent)
    assert bands == {"parameters": 49152, "master weights": 0, "gradients": 49152, "optimizer states": 0, "other persistent": 0}
