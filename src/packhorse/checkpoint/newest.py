"""A folder of checkpoints -> the newest one that is whole. Derived from what is there each time; no file says which is the latest."""

from collections.abc import Callable
from pathlib import Path

from packhorse.checkpoint.layout import REPLACED_PREFIX, STEP_PREFIX, step_of
from packhorse.checkpoint.read import verify_checkpoint
from packhorse.errors import CheckpointError
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.together import from_first, is_first


def newest_checkpoint(root: Path, report: Callable[[str], None] = print, ranks: Ranks | None = None) -> Path | None:
    """The step-N of `root` with the highest N that verifies, or None if there is none. `report` hears why each other was skipped.

    With several ranks all get the same answer: rank 0 says what there is in its `root`, each reads its share of the files, and rank 0 reports.
    """
    for path in map(Path, from_first(ranks, lambda: _newest_first(root))):
        try:
            verify_checkpoint(path, ranks)
        except CheckpointError as error:
            if is_first(ranks):
                report(f"skipped {path.name}: {error}")
        else:
            return path
    return None


def _newest_first(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    names = {path.name.removeprefix(REPLACED_PREFIX) for path in root.iterdir()}
    steps = {step: root / name for name in names if name.startswith(STEP_PREFIX) and (step := step_of(Path(name))) is not None}
    return [str(steps[step]) for step in sorted(steps, reverse=True)]
