"""A save before the first step, so that a full disk, a read-only folder or a state that cannot be saved is known before hours of training."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packhorse.checkpoint import save, verify_checkpoint
from packhorse.checkpoint.layout import STAGING_PREFIX
from packhorse.checkpoint.step import Stateful
from packhorse.errors import CheckpointError
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.together import from_first
from packhorse.train.config import RunConfig
from packhorse.units import format_bytes


def trial_save(
    checkpoints: Path, step: Stateful, extra: dict[str, Any], run: RunConfig, say: Callable[[str], None], ranks: Ranks | None = None
) -> None:
    """Saves the state of `step` in `checkpoints` for real, reads it back and removes it. Says its bytes, and warns if the disk cannot hold the run's.
    With several ranks every rank calls it.

    A run holds run.keep_last checkpoints, those of every run.keep_every steps, and one more while it saves.
    Raises CheckpointError as saving and verifying do.
    """
    # A name of this form is no step of a run, and whatever a kill leaves of it the next save clears away.
    path = Path(from_first(ranks, lambda: str((checkpoints / f"{STAGING_PREFIX}trial-{os.getpid()}").absolute())))
    try:
        save(path, step, extra)
        num_bytes = sum(size for size, _ in verify_checkpoint(path, ranks).files.values())
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise CheckpointError(
                f"cannot save a checkpoint in {checkpoints}: {error.__cause__.strerror}; this was tried before the first step, and nothing was "
                "trained yet. Free space on that disk, make the folder writable or choose another run.dir, and start again"
            ) from error
        raise CheckpointError(f"nothing was trained yet, because a first save on trial failed: {error}") from error
    finally:
        if ranks is None or ranks.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
    say(f"trial save: a checkpoint has {format_bytes(num_bytes)}; it was written, read back and removed")
    archived = run.steps // run.keep_every if run.keep_every else 0
    needed, free = (run.keep_last + archived + 1) * num_bytes, from_first(ranks, lambda: shutil.disk_usage(checkpoints).free)
    if free < needed:
        say(
            f"warning: {format_bytes(free)} are free on the disk of {checkpoints}, and this run saves up to {format_bytes(needed)} there "
            f"(run.keep_last = {run.keep_last}, run.keep_every = {run.keep_every}, and one more during a save); free space or lower these"
        )
