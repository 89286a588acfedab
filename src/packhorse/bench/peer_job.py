"""One rank of a job of `packhorse bench peers`: one system, a few steps, what they cost. Started by torchrun with a JSON object as its argument.

The object: system, shape (layers, heads, width, vocab, seq_len, batch), warmup, steps, budget, out: the file that rank 0 writes a JSON line into.
"""

import json
import statistics
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from packhorse.bench.heap_watch import HeapWatch
from packhorse.bench.peer_systems import SYSTEMS, Batch
from packhorse.models.gpt import GPT


def batch_of(shape: dict[str, int], number: int, rank: int) -> Batch:
    """This rank's part of the batch of a step: the same for every system."""
    draw = torch.Generator().manual_seed(1_000 * number + rank)
    tokens = torch.randint(0, shape["vocab"], (shape["batch"], shape["seq_len"] + 1), generator=draw)
    return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def main(asked: dict[str, Any]) -> None:
    """Every rank runs it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    system = next(s for s in SYSTEMS if s.name == asked["system"])
    # what a system imports is not memory of training
    for name in ["packhorse.api", "ortools.sat.python.cp_model"] if system.ours else [system.package] if system.package else []:
        import_module(name)
    watch = HeapWatch()
    torch.manual_seed(0)
    shape, warmup = asked["shape"], asked["warmup"]
    model = GPT(**{key: shape[key] for key in ("vocab", "layers", "width", "heads", "seq_len")})
    step = system.make(model, {"batch": batch_of(shape, 0, rank), "budget": asked["budget"]})
    del model
    walls, cpus, losses = [], [], []
    for number in range(warmup + asked["steps"]):
        batch = batch_of(shape, number, rank)
        if number == warmup:
            watch.reset()
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(batch)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        dist.all_reduce(loss)
        losses.append(loss.item() / num_ranks)
    seen = watch.seen()
    mine = {
        "walls": walls[warmup:],
        "cpu": statistics.median(cpus[warmup:]),
        "heap_peak": seen.heap_peak,
        "heap_idle": seen.heap_idle,
        "rss_peak": seen.rss_peak,
    }
    rows: list[Any] = [None] * num_ranks
    dist.all_gather_object(rows, mine)
    if rank == 0:
        slowest = [max(times) for times in zip(*(row.pop("walls") for row in rows))]
        found = {key: max(row[key] for row in rows) for key in rows[0]} | {"wall": statistics.median(slowest), "losses": losses}
        Path(asked["out"]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
