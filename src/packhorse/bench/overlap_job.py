"""One rank of `packhorse bench overlap`: steps with every wait behind its start, and as planned, in turn."""

import json
import os
import statistics
import sys
import time

import torch

import packhorse
from packhorse.models.gpt import GPT

SEQ_LEN, WARM_UP = 128, 2


def main() -> None:
    """Rank 0 writes the medians to the file `out` of the argument."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(vocab=2048, layers=asked["layers"], width=asked["width"], heads=8, seq_len=SEQ_LEN)
    ids = torch.randint(0, 2048, (asked["samples"], SEQ_LEN))
    batch = {"ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    mesh = packhorse.Mesh(dp=int(os.environ["WORLD_SIZE"]))
    plan = packhorse.plan(model, batch, optimizer=optimizer, clip_norm=1.0, mesh=mesh, zero_stage=3)
    step = packhorse.compile(model, plan)
    assert step.ranks is not None
    taken: dict[bool, list[float]] = {True: [], False: []}
    for index in range(WARM_UP + asked["rounds"]):
        for blocking in (True, False):
            step.ranks.transport.blocking = blocking
            start = time.perf_counter()
            step(batch)
            if index >= WARM_UP:
                taken[blocking].append(time.perf_counter() - start)
    if step.ranks.rank == 0:
        found = {"comm_bytes": plan.comm_bytes, "apart_s": statistics.median(taken[True]), "together_s": statistics.median(taken[False])}
        with open(asked["out"], "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
