"""One rank of a job of `packhorse calibrate --ranks`: what gathers and sums of several sizes take between the processes of this machine, over gloo.
Started by torchrun with a JSON object as its argument: rounds, out: the file that rank 0 writes the figures into.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from packhorse.bench.jobs import end_job
from packhorse.mesh import Mesh
from packhorse.parallel.pieces import bucket_bytes
from packhorse.runtime.ranks import Ranks

ELEMENTS = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20)  # float32, that each other rank gets


def collectives(ranks: Ranks, elements: int) -> list[tuple[int, Callable[[], None]]]:
    """(messages to and from others, one after another; how to run it) of a gather and of a sum in which each other rank gets so many elements."""
    transport, num_ranks = ranks.transport, ranks.mesh.world_size
    own, whole = torch.ones(elements), torch.empty(num_ranks * elements)
    summed = torch.zeros(num_ranks * elements)
    bucket = torch.empty(bucket_bytes((0,), (summed.numel(),), elements, num_ranks, own.itemsize), dtype=torch.uint8)
    total = transport.summing(summed, summed, bucket, elements, everywhere=True)
    return [
        (num_ranks - 1, lambda: transport.now("gather", transport.all_gather, own, whole)),
        (2 * (num_ranks - 1), lambda: transport.now("sum", total)),
    ]


def main() -> None:
    """Rank 0 writes [messages, bytes that a rank sends, seconds]: medians over rounds of the rank that took longest."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    ranks = Ranks(Mesh(dp=int(os.environ["WORLD_SIZE"])), int(os.environ["RANK"]), torch.device("cpu"))
    found = []
    for elements in ELEMENTS:
        for messages, collective in collectives(ranks, elements):
            taken = []
            before = ranks.transport.sent_bytes
            for _ in range(asked["rounds"] + 1):
                ranks.all_gather(torch.zeros(1), "the ranks are together")
                start = time.perf_counter()
                collective()
                taken.append(time.perf_counter() - start)
            together = 4 * (ranks.mesh.world_size - 1)
            sent = (ranks.transport.sent_bytes - before) // len(taken) - together
            slowest = ranks.all_gather(torch.tensor(taken[1:], dtype=torch.float64), "seconds").amax(0)
            found.append((messages, sent, statistics.median(slowest.tolist())))
    if not ranks.rank:
        Path(asked["out"]).write_text(json.dumps(found), encoding="utf-8")
    end_job()


if __name__ == "__main__":
    main()
