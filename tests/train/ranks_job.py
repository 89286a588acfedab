"""What one of two ranks does for test_ranks.py: several runs one after another in one process, so that torch is imported once.

python ranks_job.py CONFIG.toml OUT.json   in the environment of a launcher
"""

import io
import json
import signal
import sys
from pathlib import Path

import torch

import packhorse
import packhorse.train.trainer as trainer
from packhorse.errors import DataError, UserError
from packhorse.train.config_file import load_config
from packhorse.train.console import Console
from packhorse.train.launched import launched
from packhorse.train.start import train

torch.set_num_threads(1)
PATH, RANK = Path(sys.argv[1]), launched().rank
TAKEN = trainer.training_batch


def run(name: str, *settings: str) -> dict:
    out = io.StringIO()
    code, error = None, None
    try:
        config = load_config(PATH, [f"run.dir={PATH.parent / name}", *settings])
        code = train(config, engine=packhorse, console=Console(out))
    except UserError as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"code": code, "error": error, "said": out.getvalue()}


def on_rank_1(at: int, happens) -> None:
    """Rank 1 alone does this while it takes the batch of step `at`, counted from 1."""

    def batch(config, corpus, step, rank):
        if RANK == 1 and step + 1 == at:
            happens()
        return TAKEN(config, corpus, step, rank)

    trainer.training_batch = batch


def unreadable() -> None:
    raise DataError("the file tokens.bin has changed")


found = {"whole": run("whole")}
on_rank_1(3, lambda: signal.raise_signal(signal.SIGTERM))
found["stopped"] = run("stopped")
trainer.training_batch = TAKEN
found["resumed"] = run("stopped", "run.resume=auto")
on_rank_1(3, unreadable)
found["unreadable"] = run("unreadable")
trainer.training_batch = TAKEN
found["nan"] = run("nan", "optimizer.lr=1e30", "schedule.warmup_steps=0")
found["seeds"] = run("seeds", f"run.seed={RANK + 1}")
found["dropout"] = run("dropout", "model.dropout=0.5", "run.steps=1")
found["full"] = run("whole")
found["tensor"] = run("tensor", "mesh.tp=2", "run.steps=3")
on_rank_1(2, lambda: signal.raise_signal(signal.SIGTERM))
found["tensor stopped"] = run("tensor stopped", "mesh.tp=2", "run.steps=3")
trainer.training_batch = TAKEN
found["tensor resumed"] = run("tensor stopped", "mesh.tp=2", "run.steps=3", "run.resume=auto")
found["onward"] = run("tensor", "run.resume=auto")
found["sequence"] = run("sequence", "mesh.tp=2", "mesh.sequence_parallel=true", f"run.resume={PATH.parent / 'whole' / 'checkpoints' / 'step-3'}")
Path(sys.argv[2]).write_text(json.dumps(found))
