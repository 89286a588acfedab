"""One rank of a job of `packhorse bench strategies`: a small GPT by several strategies of one mesh, within a limit of bytes.

Started by torchrun with a JSON object as its argument: strategies, each a dict of the fields of Strategy; limit: bytes of a rank; host_budget: of its
host memory; device: a device file; out: the file that rank 0 writes a list of dicts of the fields of Ran into.
"""

import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import packhorse
from packhorse.bench.jobs import end_job
from packhorse.bench.residency_job import is_exact
from packhorse.errors import BudgetError
from packhorse.models.gpt import GPT
from packhorse.search.strategy import Strategy

SHAPE = {"vocab": 96, "layers": 9, "width": 64, "heads": 4, "seq_len": 32}
CLIP_NORM = 1.0
STEPS = 2


@dataclass(frozen=True)
class Ran:
    """A strategy on all ranks. peak_bytes, measured_bytes: of the rank with the most, planned and of any step. exact: bytes of device and host, and
    bytes sent, were the planned ones on every rank. failure: why there is no plan within the limit."""

    strategy: Strategy
    peak_bytes: int = 0
    measured_bytes: int = 0
    exact: bool = False
    failure: str = ""


def batch_of(samples: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Ids and labels, (samples, tokens)."""
    draw = torch.Generator().manual_seed(rank)
    ids, labels = (torch.randint(0, SHAPE["vocab"], (samples, SHAPE["seq_len"]), generator=draw) for _ in range(2))
    return {"ids": ids, "labels": labels}


def attempt(strategy: Strategy, asked: dict[str, Any], rank: int) -> Ran:
    """Every rank runs it."""
    torch.manual_seed(0)
    model = GPT(**SHAPE).train()
    mesh = strategy.mesh
    batch = batch_of(strategy.samples, mesh.dp_rank(rank))
    plan, failure = None, ""
    try:
        plan = packhorse.plan(
            model,
            batch,
            optimizer=torch.optim.AdamW(model.parameters()),
            clip_norm=CLIP_NORM,
            mesh=mesh,
            rank=rank,
            zero_stage=strategy.stage,
            recompute=strategy.recompute,
            residency=strategy.residency,
            budget=asked["limit"],
            host_budget=asked["host_budget"] if strategy.residency == "offload" else None,
            device=asked["device"],
        )
    except BudgetError as error:
        failure = str(error)
    failures = every(failure, mesh.world_size)
    if plan is None or any(failures):
        return Ran(strategy, failure=next(filter(None, failures)))
    step, measured, exact = packhorse.compile(model, plan), 0, True
    for _ in range(STEPS):
        step(batch)
        exact &= is_exact(step)
        measured = max(measured, step.ledger().measured_peak_bytes or 0)
    peaks, measures, exacts = zip(*every((plan.peak_bytes, measured, exact), mesh.world_size))
    return Ran(strategy, max(peaks), max(measures), all(exacts))


def every(own: Any, ranks: int) -> list[Any]:
    """What each rank has."""
    rows: list[Any] = [own] * ranks
    dist.all_gather_object(rows, own)
    return rows


def main(asked: dict[str, Any]) -> None:
    """Every rank runs it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [attempt(Strategy(**fields), asked, dist.get_rank()) for fields in asked["strategies"]]
    if dist.get_rank() == 0:
        Path(asked["out"]).write_text(json.dumps([asdict(ran) for ran in found]))
    end_job()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
