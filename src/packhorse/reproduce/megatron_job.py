"""One of N tp ranks of `packhorse reproduce megatron`: a GPT on the bytes of the standard library, every step the same for any N.

Started by torchrun with a JSON object as its argument: shape (layers, width, heads, seq_len), vocab, batch, micro_batches, lr, warmup, steps, out:
the file that rank 0 writes a dict of the fields of Ran into.
"""

import hashlib
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import packhorse
from packhorse.bench.jobs import end_job
from packhorse.data.batches import training_samples
from packhorse.data.corpus import Corpus, load_corpus
from packhorse.models.gpt import GPT

SEED = 0


@dataclass(frozen=True)
class Ran:
    """What became of a job. losses: of each step. start: a digest of the weights before the first one. exact: on every rank, in every step, the
    measured peak and the bytes sent are the predicted ones.

    parameters: of the model. flops: of one rank's step. wall_s: a step, of the slowest rank; cpu_s: CPU seconds of a step on each rank; both medians
    over the steps after the warm-up. sent: bytes of rank 0 in a step.
    """

    losses: list[float]
    start: str
    exact: bool
    parameters: int
    flops: int
    wall_s: float
    cpu_s: list[float]
    sent: int


def batch_of(corpus: Corpus, asked: dict[str, Any], step: int) -> Any:
    """A step's micro-batches; one of them alone."""
    size, seq_len = asked["batch"], asked["shape"]["seq_len"]
    drawn = training_samples(corpus, order="random", seed=SEED, first=step * size, count=size, global_batch_size=size, seq_len=seq_len)
    ids, labels = (torch.from_numpy(part) for part in drawn)
    micros = [{"ids": i, "labels": l} for i, l in zip(ids.chunk(asked["micro_batches"]), labels.chunk(asked["micro_batches"]))]
    return micros if len(micros) > 1 else micros[0]


def digest(state: dict[str, Tensor]) -> str:
    """Of names and bits."""
    found = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(asked: dict[str, Any]) -> None:
    """Every rank runs it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    corpus = load_corpus("stdlib")
    torch.manual_seed(SEED)
    model = GPT(vocab=asked["vocab"], **asked["shape"])
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked["lr"], weight_decay=0.01)
    plan = packhorse.plan(
        model,
        batch_of(corpus, asked, 0),
        optimizer=optimizer,
        clip_norm=1.0,
        num_micro_batches=asked["micro_batches"],
        mesh=packhorse.Mesh(tp=num_ranks),
        rank=rank,
    )
    step = packhorse.compile(model, plan)
    start, exact = digest(step.state_dict()), True
    losses, walls, cpus = [], [], []
    for number in range(asked["warmup"] + asked["steps"]):
        batch = batch_of(corpus, asked, number)
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        losses.append(step(batch).item())
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        ledger = step.ledger()
        exact &= ledger.measured_peak_bytes == ledger.predicted_peak_bytes and ledger.measured_comm_bytes == ledger.predicted_comm_bytes
    rows: list[Any] = [None] * num_ranks
    dist.all_gather_object(rows, (exact, walls[asked["warmup"] :], statistics.median(cpus[asked["warmup"] :])))
    if rank == 0:
        slowest = statistics.median(max(of_ranks) for of_ranks in zip(*(walls for _, walls, _ in rows)))
        everywhere = all(same for same, _, _ in rows)
        ran = Ran(losses, start, everywhere, parameters, plan.flops, slowest, [cpu for _, _, cpu in rows], plan.comm_bytes)
        Path(asked["out"]).write_text(json.dumps(asdict(ran)))
    end_job()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
