"""Records -> a run of Weights & Biases, whose number is kept in RUN/wandb-id; needs the package wandb.

Project, entity, key and mode (online, offline, disabled) are those of wandb's own settings.
Known shortcoming: W&B takes steps in rising order only. It keeps what it has, so steps done again after a resume are not sent again; of a run
that goes back and takes another way, it goes on showing the first way up to where that had come. Offline nobody knows what was sent: each
session is a folder of its own in RUN/wandb, and steps done again are in two of them.
"""

import uuid
from pathlib import Path
from typing import Any

from packhorse.train.metrics import Record, scalars


class WeightsAndBiases:
    """Begins or resumes the W&B run of the run folder `root`, with the settings `config`. Raises what wandb raises."""

    def __init__(self, root: Path, config: dict[str, Any]) -> None:
        import wandb

        kept = root / "wandb-id"
        self.found_earlier = kept.exists()
        number = kept.read_text(encoding="utf-8").strip() if self.found_earlier else uuid.uuid4().hex[:8]
        self._run = wandb.init(id=number, resume="allow", name=root.name, dir=root, config=config, allow_val_change=True)
        kept.write_text(number, encoding="utf-8")
        self._next_step = self._run.starting_step

    @staticmethod
    def is_installed() -> bool:
        try:
            import wandb
        except ImportError:
            return False
        return hasattr(wandb, "init")  # a folder of that name, which wandb itself makes, imports as an empty package

    def write(self, record: Record) -> None:
        if record["step"] >= self._next_step:
            self._run.log(scalars(record), step=record["step"])

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=1 if failed else 0)
