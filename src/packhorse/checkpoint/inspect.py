"""What checkpoints a folder holds, and whether they are whole. Nothing here changes anything."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packhorse.checkpoint.layout import MANIFEST, STAGING_PREFIX, step_of
from packhorse.checkpoint.read import verify_checkpoint
from packhorse.errors import CheckpointError


@dataclass(frozen=True)
class Inspected:
    """One checkpoint. `step` None: not one of a run; num_bytes: of its files; saved_s: when, in seconds since 1970; `damage` None: whole."""

    path: Path
    step: int | None
    num_bytes: int
    saved_s: float | None
    damage: str | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: the fields, and "whole"."""
        return asdict(self) | {"path": str(self.path), "whole": self.damage is None}


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is meant as one checkpoint, by its manifest or its name."""
    return (path / MANIFEST).exists() or step_of(path) is not None


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, or of a folder of them, in the order of their steps, then those set aside.

    Raises CheckpointError if there is no such folder.
    """
    folder = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}; give the folder of a run, or one that holds checkpoints")
    found = [path for path in folder.iterdir() if is_checkpoint(path) and not path.name.startswith(STAGING_PREFIX)]
    return sorted(found, key=lambda path: (step_of(path) is None, step_of(path) or 0, path.name))


def inspect(path: Path) -> Inspected:
    """Reads every byte of the checkpoint `path`."""
    damage = None
    try:
        verify_checkpoint(path)
    except CheckpointError as error:
        damage = str(error)
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file()) if path.is_dir() else 0
    manifest = path / MANIFEST
    return Inspected(path, step_of(path), num_bytes, manifest.stat().st_mtime if manifest.exists() else None, damage)
