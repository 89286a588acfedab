"""What one rank of a job finds out, all ranks learn: they go on together, or fail together in the same words. `ranks` None: this process is alone."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from packhorse import errors
from packhorse.errors import PeerError, UserError
from packhorse.runtime.ranks import Ranks

Found = TypeVar("Found")


def together(ranks: Ranks | None, work: Callable[[], Found]) -> Found:
    """Runs `work` on every rank and returns what it returned here.

    Raises UserError, on all ranks, if one of them did: that of the first such rank, which its number goes before unless all say the same.
    """
    return work() if ranks is None else _together(ranks, work, True)


def of_each(ranks: Ranks | None, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on every rank and returns to all what each rank's returned, which is JSON-able, in the order of the ranks. Raises as `together`."""
    found = together(ranks, work)
    return [found] if ranks is None else [json.loads(text) for text in ranks.texts(json.dumps(found), "answers")]


def from_first(ranks: Ranks | None, work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0 alone, for all, and returns to all ranks what it returned, which is JSON-able. Raises its UserError on all."""
    if ranks is None:
        return work()
    found = _together(ranks, lambda: None if ranks.rank else work(), False)
    return json.loads(ranks.texts(json.dumps(found), "answer")[0])


def first_ahead(ranks: Ranks | None, work: Callable[[], Found]) -> Found:
    """Runs `work` on rank 0, then, when it is done there, on the others: they find what it has written. Raises as `together`."""
    if ranks is None:
        return work()
    first = _together(ranks, lambda: None if ranks.rank else work(), False)
    other = _together(ranks, lambda: work() if ranks.rank else None, True)
    found = other if ranks.rank else first
    assert found is not None
    return found


def is_first(ranks: Ranks | None) -> bool:
    """This process is rank 0, or alone."""
    return ranks is None or ranks.rank == 0


def _together(ranks: Ranks, work: Callable[[], Found], numbered: bool) -> Found:
    failure: UserError | None = None
    try:
        found = work()
    except PeerError:
        raise  # there is nobody left to tell
    except UserError as error:
        failure = error
    own = None if failure is None else [type(failure).__name__, str(failure)]  # JSON: nothing that comes from elsewhere is unpickled
    heard = [json.loads(text) for text in ranks.texts(json.dumps(own), "errors")]
    if all(said is None for said in heard):
        return found
    if failure is not None and all(said == own for said in heard):
        raise failure
    rank, (kind, words) = next((rank, said) for rank, said in enumerate(heard) if said is not None)
    raise getattr(errors, kind, UserError)(f"rank {rank}: {words}" if numbered else words) from failure
