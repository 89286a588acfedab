"""What one rank finds out about a checkpoint, all ranks learn: they go on together, or fail together in the same words."""

import json
from collections.abc import Callable
from typing import Any

from packhorse.errors import CheckpointError
from packhorse.runtime.ranks import Ranks


def together(ranks: Ranks | None, work: Callable[[], Any]) -> list[Any]:
    """Runs `work` on every rank, and gives what each rank's returned (JSON-able), in the order of the ranks. ranks None: this process is alone.

    Raises CheckpointError, on all ranks, if that of one rank did: in the words of the first such rank.
    """
    if ranks is None:
        return [work()]
    failure: CheckpointError | None = None
    try:
        said = {"done": work()}
    except CheckpointError as error:
        failure, said = error, {"failed": str(error)}
    # JSON, as nothing that comes from elsewhere is unpickled
    heard = [json.loads(text) for text in ranks.texts(json.dumps(said), "checkpoint")]
    for rank, other in enumerate(heard):
        if "failed" in other:
            where = "" if all(found == heard[0] for found in heard) else f"rank {rank}: "
            raise CheckpointError(f"{where}{other['failed']}") from failure
    return [other["done"] for other in heard]


def on_first(ranks: Ranks | None, work: Callable[[], Any]) -> Any:
    """Runs `work` on rank 0 alone, and gives all ranks what it returned. Raises CheckpointError as `together` does."""
    return together(ranks, lambda: work() if is_first(ranks) else None)[0]


def is_first(ranks: Ranks | None) -> bool:
    """This process is rank 0, or alone."""
    return ranks is None or ranks.rank == 0
