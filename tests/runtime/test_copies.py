"""The copy engine: bytes arrive, the pace of the link is kept, the two directions overlap, errors come where they are waited for."""

import time

import pytest
import torch

from packhorse.device.links import Link
from packhorse.runtime.copies import CHUNK_BYTES, CopyEngine

pytestmark = pytest.mark.cpu


def numbers(count):
    return torch.arange(count, dtype=torch.float32)


@pytest.mark.parametrize("link", [None, Link(0.0, 1e12)])
@pytest.mark.parametrize("elements", [1, 3, CHUNK_BYTES // 4, CHUNK_BYTES // 2 + 5])
def test_bytes_arrive_and_come_back(link, elements):
    """Also where a copy is made of several chunks, the last one a part."""
    engine = CopyEngine(link)
    given, there, back = numbers(elements), torch.zeros(elements), torch.zeros(elements)
    engine.to_host("a", given, there)
    engine.wait("a")
    engine.from_host("b", there, back)
    engine.wait("b")
    assert torch.equal(there, given) and torch.equal(back, given)
    assert engine.copied_bytes == 2 * 4 * elements


@pytest.mark.parametrize("value", [torch.tensor(True), torch.tensor(7), torch.arange(6).view(2, 3).t(), torch.tensor([1j, 2.0])])
def test_any_dtype_and_order_of_dims(value):
    engine = CopyEngine(Link(0.0, 1e12))
    target = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()
    engine.to_host("a", value, target)
    engine.wait("a")
    assert torch.equal(target, value)


def test_the_pace_of_the_link_is_kept():
    """Two copies of 4 MiB at 200 MiB a second, 10 ms each before the first byte: 60 ms together, one after another. A busy machine takes longer."""
    engine = CopyEngine(Link(0.01, 200 * 2**20))
    given, there = numbers(2**20), [torch.zeros(2**20), torch.zeros(2**20)]
    begin = time.monotonic()
    engine.to_host("a", given, there[0])
    engine.to_host("b", given, there[1])
    engine.wait("a")
    assert time.monotonic() - begin >= 0.03
    engine.wait("b")
    assert time.monotonic() - begin >= 0.06
    assert all(torch.equal(target, given) for target in there)


def test_both_directions_go_on_at_once():
    """Half a second to the host, nothing to speak of back: it is here while the other is under way."""
    engine = CopyEngine(Link(0.0, 2e6))
    engine.to_host("a", numbers(250_000), torch.zeros(250_000))
    engine.from_host("b", numbers(1), torch.zeros(1))
    engine.wait("b")
    assert not engine.out.started["a"].ended(0)
    engine.wait("a")


def test_a_tag_may_be_used_again():
    engine = CopyEngine()
    for k in range(3):
        target = torch.zeros(4)
        engine.to_host("a", numbers(4) + k, target)
        engine.wait("a")
        assert torch.equal(target, numbers(4) + k)


def test_an_error_in_a_copy_is_raised_where_it_is_waited_for():
    engine = CopyEngine()
    engine.to_host("a", numbers(4), torch.zeros(3))
    with pytest.raises(RuntimeError, match="size"):
        engine.wait("a")
    back = torch.zeros(4)
    engine.from_host("b", numbers(4), back)  # the other direction goes on
    engine.wait("b")
    assert torch.equal(back, numbers(4))


def test_a_long_wait_looks_around(monkeypatch):
    """Another rank may have failed meanwhile."""
    monkeypatch.setattr("packhorse.runtime.beside.LOOK_AROUND_S", 0.01)

    def failed():
        raise RuntimeError("rank 1 is gone")

    engine = CopyEngine(Link(0.1, 1e12), failed)
    engine.to_host("a", numbers(4), torch.zeros(4))
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        engine.wait("a")


def test_what_is_dropped_has_ended():
    """After an error in a step nobody waits for its copies. The next one may use their memory at once: none of them writes there any more."""
    engine = CopyEngine(Link(0.05, 1e12))
    there, back = torch.zeros(4), torch.zeros(4)
    engine.to_host("a", numbers(4), there)
    engine.from_host("a, back", numbers(4), back)
    engine.from_host("b", numbers(4), back)
    engine.drop()
    there.fill_(7), back.fill_(7)
    time.sleep(0.15)
    assert (there == 7).all() and (back == 7).all()
    engine.to_host("a", numbers(4), there)
    engine.wait("a")
    assert torch.equal(there, numbers(4))


def test_dropping_a_copy_that_failed_says_nothing():
    engine = CopyEngine()
    engine.to_host("a", numbers(4), torch.zeros(3))
    engine.drop()
