"""One rank of `packhorse reproduce zero --what residual`: the five configurations of ZeRO's table 3, run for real on one GPT.

Started by torchrun with a JSON object as its argument: shape (layers, width, heads, seq_len), vocab, samples, dp, tp, configs: dicts of the fields of
Config, steps, out: the file that rank 0 writes into: for each configuration a list of dicts of the fields of Ran, one of each rank.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import packhorse
from packhorse.bench.jobs import end_job
from packhorse.bench.residency_job import digest, is_exact
from packhorse.models.gpt import GPT
from packhorse.planning.plan import Plan
from packhorse.planning.waiting import AGAIN, SLICE, SLICE_ON_HOST, Waiting, waiting_values


@dataclass(frozen=True)
class Config:
    """A line of table 3. stage: of ZeRO-DP; residency: as packhorse.plan takes it."""

    name: str
    means: str
    stage: int
    residency: str

    @property
    def host_budget(self) -> str | None:
        return "100%" if self.residency == "offload" else None


@dataclass(frozen=True)
class Saved:
    """Bytes of the saved values that all tp ranks have alike, on one rank. cut: whole, of those that are cut; slices: this rank's of them; padding:
    of the slices of all ranks together; uncut: of the others; device, host: what is held there while they wait."""

    cut: int
    slices: int
    padding: int
    uncut: int
    device: int
    host: int


@dataclass(frozen=True)
class Ran:
    """One rank and configuration. bits: of losses, and of gradients after the last step. exact: peak, bytes on the host and bytes sent were those of
    the plan in every step. persistent: kind -> bytes. elements: of this rank's parameters."""

    bits: str
    exact: bool
    losses: list[float]
    peak_bytes: int
    host_bytes: int
    sent_bytes: int
    persistent: dict[str, int]
    elements: int
    saved: Saved


def planned(model: GPT, batch: dict[str, torch.Tensor], config: Config, mesh: packhorse.Mesh, rank: int, precision: str = "fp32") -> Plan:
    """A configuration with every block computed again from its input, as the paper has it."""
    return packhorse.plan(
        model,
        batch,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        mesh=mesh,
        rank=rank,
        zero_stage=config.stage,
        recompute="blocks",
        residency=config.residency,
        host_budget=config.host_budget,
        precision=precision,
    )


def waiting(plan: Plan) -> list[Waiting]:
    """Saved values that are not made again."""
    return [w for w in waiting_values(plan.programs["first"].graph) if w.way != AGAIN]


def saved_of(plan: Plan, tp: int) -> Saved:
    """What of them all tp ranks have alike."""
    alike = [w for w in waiting(plan) if w.maker.replicated]
    cut = [w for w in alike if w.way in (SLICE, SLICE_ON_HOST)]
    whole, slices = sum(w.num_bytes for w in cut), sum(w.device_bytes + w.host_bytes for w in cut)
    uncut = sum(w.num_bytes for w in alike) - whole
    return Saved(whole, slices, slices * tp - whole, uncut, sum(w.device_bytes for w in alike), sum(w.host_bytes for w in alike))


def elements_of(plan: Plan) -> int:
    """Of a rank's parameters, as tp cuts them and before dp does, without padding of storage."""
    assert plan.zero is not None
    runs = [run for run in plan.zero.whole.runs if run.kind == "parameters"]
    return sum(slot.value.num_elements for run in runs for slot in run.slots)


def ran(asked: dict[str, Any], config: Config, rank: int) -> Ran:
    """Plans and runs a configuration."""
    torch.manual_seed(0)
    model = GPT(vocab=asked["vocab"], **asked["shape"]).train()
    mesh = packhorse.Mesh(dp=asked["dp"], tp=asked["tp"])
    draw = torch.Generator().manual_seed(mesh.dp_rank(rank))
    size = asked["samples"], asked["shape"]["seq_len"]
    batch = {name: torch.randint(0, asked["vocab"], size, generator=draw) for name in ("ids", "labels")}
    plan = planned(model, batch, config, mesh, rank)
    step = packhorse.compile(model, plan)
    losses, exact = [], True
    for _ in range(asked["steps"]):
        losses.append(step(batch).item())
        exact &= is_exact(step)
    bits, kinds = digest(losses, step.grads()), plan.persistent.bytes_by_kind()
    saved = saved_of(plan, asked["tp"])
    return Ran(bits, exact, losses, plan.peak_bytes, plan.host_bytes, plan.comm_bytes, kinds, elements_of(plan), saved)


def main(asked: dict[str, Any]) -> None:
    """Every rank runs it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), []
    for config in asked["configs"]:
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, asdict(ran(asked, Config(**config), rank)))
        found.append(rows)
    if rank == 0:
        Path(asked["out"]).write_text(json.dumps(found))
    end_job()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
