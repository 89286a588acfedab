"""What one rank of a run finds out, all ranks learn: they go on together, or fail together in the same words. `ranks` None: this process is alone."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from packhorse.errors import PeerError, UserError
from packhorse.runtime.ranks import Ranks

Found = TypeVar("Found")


def together(ranks: Ranks | None, work: Callable[[], Found]) -> Found:
    """Runs `work` on every rank and returns what it returned here.

    Raises UserError, on all ranks, if one of them did: in the words of the first such rank, with its number unless all say the same.
    """
    if ranks is None:
        return work()
    failure: UserError | None = None
    try:
        found = work()
    except PeerError:
        raise  # there is nobody left to tell
    except UserError as error:
        failure = error
    heard = [json.loads(text) for text in ranks.texts(json.dumps(str(failure) if failure else None), "errors")]
    if all(said is None for said in heard):
        return found
    if failure is not None and len(set(heard)) == 1:
        raise failure
    rank, said = next((rank, said) for rank, said in enumerate(heard) if said is not None)
    kind = type(failure) if failure is not None else UserError
    raise kind(f"rank {rank}: {said}") from failure


def from_first(ranks: Ranks | None, work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0 alone, and returns to all ranks what it returned, which is JSON-able. Raises as `together`."""
    if ranks is None:
        return work()
    found = together(ranks, lambda: work() if ranks.rank == 0 else None)
    return json.loads(ranks.texts(json.dumps(found), "answer")[0])


def first_ahead(ranks: Ranks | None, work: Callable[[], Found]) -> Found:
    """Runs `work` on rank 0, then, when it is done there, on the others: they find what it has written. Raises as `together`."""
    if ranks is None:
        return work()
    found = together(ranks, lambda: work() if ranks.rank == 0 else None)
    others = together(ranks, lambda: work() if ranks.rank else None)
    done = others if ranks.rank else found
    assert done is not None
    return done
