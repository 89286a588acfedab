"""Ranks as boards over one store in memory."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from packhorse.errors import PeerError, UserError
from packhorse.runtime import board
from packhorse.runtime.board import Board

pytestmark = pytest.mark.cpu


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr(board, "_PATIENCE_S", 0.01)
    store = dist.HashStore()
    found = [Board(store, rank, 4) for rank in range(4)]
    for one in found:
        one.step = 3
    return found


def said(one, error):
    """What a rank says that ends a step with the error."""
    with pytest.raises(type(error)) as caught, one.telling():
        raise error
    return str(caught.value)


def looks(one):
    """What a rank says that comes to look while it waits."""
    with pytest.raises(PeerError) as caught, one.telling():
        one.look()
    return caught.value.peer, str(caught.value)


def test_the_first_failure_is_what_all_say(ranks):
    assert said(ranks[2], ValueError("no room")) == "no room"
    assert said(ranks[3], UserError("another one")) == "another one"
    for rank in (0, 1):
        peer, text = looks(ranks[rank])
        assert peer == 2 and text.startswith("rank 2 failed first, at step 3: ValueError: no room") and f"rank {rank} was at step 3" in text


def test_ranks_that_never_talk_to_the_one_that_is_gone_hear_of_it(ranks):
    """In a mesh a rank has to do with some ranks only. Those end, and must not be taken for the reason."""
    text = said(ranks[2], PeerError(3, "Connection closed by peer", "sum 1"))
    assert text.startswith("rank 3 is gone without a word") and "in the collective 'sum 1'; Connection closed" in text
    peer, text = looks(ranks[0])
    assert peer == 3 and text.startswith("rank 3 is gone without a word") and "rank 0 was at step 3" in text
    with pytest.raises(PeerError, match="rank 3 is gone without a word") as caught, ranks[1].telling():
        raise PeerError(2, "Connection closed by peer", "sum 2")
    assert caught.value.peer == 3


def test_who_waits_too_long_says_for_whom(ranks):
    text = said(ranks[2], PeerError(3, "Timed out waiting", "sum 1"))
    assert "waited too long for rank 3" in text and "rank 3: has said nothing yet" in text
    assert "waited too long for rank 3" in looks(ranks[0])[1]


def test_what_failed_in_an_earlier_step_is_past(ranks):
    said(ranks[2], ValueError("no room"))
    with ranks[2].telling():
        pass
    with ranks[0].telling():
        pass
    with ranks[0].telling():
        ranks[0].look()


def test_a_rank_is_where_it_waited_last(ranks):
    ranks[0].transports = [SimpleNamespace(place="sum 1", since=2.0), SimpleNamespace(place="gather 1", since=1.0)]
    said(ranks[2], ValueError("no room"))
    assert "in the collective 'sum 1'" in looks(ranks[0])[1]
