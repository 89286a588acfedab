"""One rank of a job of `packhorse bench peers`: one system, a few steps, what they cost. Started by torchrun with a JSON object as its argument.

The object: system, shape (layers, heads, width, vocab, seq_len, batch, share), warmup, steps, budget, device (a device file, or None), out: the file
that rank 0 writes a JSON line into.
"""

import gc
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
from packhorse.bench.jobs import end_job
from packhorse.bench.peer_systems import SYSTEMS, Batch
from packhorse.bench.peer_tensor import TENSOR_SYSTEMS
from packhorse.models.gpt import GPT


def batch_of(shape: dict[str, Any], number: int, rank: int) -> Batch:
    """This rank's part of the batch of a step: the same for every system."""
    draw = torch.Generator().manual_seed(1_000 * number + rank)
    tokens = torch.randint(0, shape["vocab"], (shape["batch"], shape["seq_len"] + 1), generator=draw)
    return {"ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}


def batch_of_all(shape: dict[str, Any], number: int, num_ranks: int) -> Batch:
    """The batch of a step: what all ranks together see."""
    parts = [batch_of(shape, number, rank) for rank in range(num_ranks)]
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def main(asked: dict[str, Any]) -> None:
    """Every rank runs it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    system = next(s for s in (*SYSTEMS, *TENSOR_SYSTEMS) if s.name == asked["system"])
    for name in ("torch._dynamo", *system.imports):  # the first is what every optimizer imports
        import_module(name)
    gc.collect()  # what importing leaves behind would else be taken off
    watch = HeapWatch()
    torch.manual_seed(0)
    shape, warmup = asked["shape"], asked["warmup"]
    model = GPT(**{key: shape[key] for key in ("vocab", "layers", "width", "heads", "seq_len")})

    def batch_of_step(number: int) -> Batch:
        return batch_of_all(shape, number, num_ranks) if system.tensor else batch_of(shape, number, rank)

    settings = {"batch": batch_of_step(0), "budget": asked["budget"], "share": shape["share"], "device": asked["device"]}
    step = system.make(model, settings)
    del model
    walls, cpus, losses = [], [], []
    for number in range(warmup + asked["steps"]):
        batch = batch_of_step(number)
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
    end_job()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
