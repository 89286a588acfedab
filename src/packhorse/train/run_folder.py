"""RUN/config.toml, RUN/metrics.jsonl, RUN/checkpoints/step-N: where a run lives, and where it starts from."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packhorse.checkpoint import newest_checkpoint
from packhorse.checkpoint.layout import step_of
from packhorse.checkpoint.write import set_aside
from packhorse.errors import CheckpointError, ConfigError
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.together import from_first
from packhorse.train.config import Config
from packhorse.train.config_file import differing_keys, format_config, load_config


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run. Nothing is created before `write_config`."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, steps_done: int) -> Path:
        """Where the state after `steps_done` steps is saved."""
        return self.checkpoints / f"step-{steps_done}"

    def start(self, resume: str, report: Callable[[str], None], ranks: Ranks | None = None) -> Path | None:
        """The checkpoint that a run with run.resume = `resume` starts from, or None for a fresh start.

        "auto": the newest whole checkpoint of this folder; "none": a fresh start; else the path of a checkpoint. With several ranks it is rank 0 that
        looks, and each reads its share of the files.
        Raises ConfigError for "none" if a run is here already, CheckpointError if checkpoints are here and none is whole.
        """
        if not str(self.root).strip(". /"):
            raise ConfigError(f"run.dir = {str(self.root)!r} is no folder of a run's own; choose one with --set run.dir=runs/NAME")
        if resume == "auto":
            newest = newest_checkpoint(self.checkpoints, report, ranks)
            if newest is None:
                from_first(ranks, self._require_no_steps)
            return newest
        if resume != "none":
            return Path(resume)
        from_first(ranks, self._require_no_run)
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While inside, no other process trains in this folder. Raises ConfigError if one does, or if the folder cannot be made."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise ConfigError(f"cannot write into run.dir = {str(self.root)!r}: {error.strerror}; choose another with --set run.dir=...") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ConfigError(
                f"another process is training in run.dir = {str(self.root)!r}; wait until it ends, or choose another with --set run.dir=..."
            ) from None
        finally:
            os.close(descriptor)

    def write_config(self, config: Config, report: Callable[[str], None]) -> None:
        """Saves the resolved configuration, and reports in which keys it differs from an earlier one of this folder."""
        if self.config.exists():
            changed = differing_keys(load_config(self.config), config)
            if changed := [key for key in changed if key not in ("run.dir", "run.resume")]:
                report(f"settings changed since the last time: {', '.join(changed)}")
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            # In one move: a kill must not leave half a configuration, which the next --resume auto could not read.
            staging = self.config.with_name(f".{self.config.name}-{os.getpid()}")
            staging.write_text(format_config(config), encoding="utf-8")
            staging.replace(self.config)
        except OSError as error:
            raise ConfigError(f"cannot write to run.dir = {str(self.root)!r}: {error.strerror} ({error.filename}); choose another folder") from error

    def set_aside_beyond(self, steps_done: int, report: Callable[[str], None]) -> None:
        """Renames checkpoints after `steps_done`: going back to an earlier one starts a new branch, and the old must not win later."""
        for path in self._steps():
            step = step_of(path)
            if step is not None and step > steps_done:
                report(f"{path.name} lies beyond the resumed step; kept as {set_aside(path, 'aside').name}")

    def _require_no_steps(self) -> None:
        if self._steps():
            raise CheckpointError(
                f"none of the {len(self._steps())} checkpoints in {self.checkpoints} is whole; "
                "start a new run in another folder with --set run.dir=..., or put a good copy of one there"
            )

    def _require_no_run(self) -> None:
        if self.config.exists() or self.metrics.exists() or self._steps():
            raise ConfigError(
                f"run.dir = {str(self.root)!r} holds a run already, and it is not overwritten; "
                "go on with it by --resume auto, or choose another folder with --set run.dir=..."
            )

    def newest_before(self, steps_done: int) -> Path | None:
        """The last checkpoint before step `steps_done`; it is not read."""
        before = [step for path in self._steps() if (step := step_of(path)) is not None and step < steps_done]
        return self.checkpoint(max(before)) if before else None

    def _steps(self) -> list[Path]:
        return [path for path in self.checkpoints.iterdir() if step_of(path) is not None] if self.checkpoints.is_dir() else []
