"""Ranks that are threads here: `texts` is all that `together` asks of them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from packhorse.errors import ConfigError, PeerError, UserError
from packhorse.runtime.together import first_ahead, from_first, together

pytestmark = pytest.mark.cpu


class Threads:
    """The ranks of a job; each is seen as `of(rank)`."""

    def __init__(self, count):
        self.barrier, self.said = Barrier(count, timeout=10), [""] * count

    def of(self, rank):
        threads = self

        class Ranks:
            def __init__(self):
                self.rank = rank

            def texts(self, own, tag):
                assert own
                threads.said[rank] = own
                threads.barrier.wait()
                heard = list(threads.said)
                threads.barrier.wait()
                return heard

        return Ranks()


def on_each(act, count=3):
    """What act(ranks) returned or raised on each."""

    def run(ranks):
        try:
            return act(ranks)
        except UserError as error:
            return f"{type(error).__name__}: {error}"

    threads = Threads(count)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, [threads.of(rank) for rank in range(count)]))


def fails(error):
    raise error


def test_each_gets_its_own():
    assert on_each(lambda ranks: together(ranks, lambda: ranks.rank * 10)) == [0, 10, 20]
    assert together(None, lambda: "alone") == from_first(None, lambda: "alone") == first_ahead(None, lambda: "alone") == "alone"


def test_the_first_that_fails_speaks_for_all():
    found = on_each(lambda ranks: together(ranks, lambda: fails(ConfigError(f"no {ranks.rank}")) if ranks.rank else None))
    assert found == ["ConfigError: rank 1: no 1"] * 3


def test_the_same_mistake_everywhere_has_no_number():
    assert on_each(lambda ranks: together(ranks, lambda: fails(ConfigError("no")))) == ["ConfigError: no"] * 3


def test_what_rank_0_does_for_all():
    ran = []
    assert on_each(lambda ranks: from_first(ranks, lambda: ran.append(ranks.rank) or {"a": [1, None]})) == [{"a": [1, None]}] * 3
    assert ran == [0]
    assert on_each(lambda ranks: from_first(ranks, lambda: fails(UserError("full")))) == ["UserError: full"] * 3


def test_rank_0_goes_ahead():
    order = []
    assert on_each(lambda ranks: first_ahead(ranks, lambda: order.append(ranks.rank) or f"of {ranks.rank}")) == ["of 0", "of 1", "of 2"]
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_a_rank_that_has_lost_the_others_does_not_wait_for_them():
    ranks = Threads(2).of(0)
    with pytest.raises(PeerError):
        together(ranks, lambda: fails(PeerError(1, "gone")))
