"""A folder of checkpoints -> the newest one that is whole. Derived from what is there each time; no file says which is the latest."""

from collections.abc import Callable
from pathlib import Path

from packhorse.checkpoint.layout import REPLACED_PREFIX, STEP_PREFIX, step_of
from packhorse.checkpoint.read import verify_checkpoint
from packhorse.errors import CheckpointError


def newest_checkpoint(root: Path, report: Callable[[str], None] = print) -> Path | None:
    """The step-N of `root` with the highest N that verifies, or None if there is none. `report` hears why each other was skipped."""
    if not root.is_dir():
        return None
    names = {path.name.removeprefix(REPLACED_PREFIX) for path in root.iterdir()}
    steps = {step: root / name for name in names if name.startswith(STEP_PREFIX) and (step := step_of(Path(name))) is not None}
    for step in sorted(steps, reverse=True):
        try:
            verify_checkpoint(steps[step])
        except CheckpointError as error:
            report(f"skipped {steps[step].name}: {error}")
        else:
            return steps[step]
    return None
