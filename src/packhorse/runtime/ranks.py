"""The other processes of a job: joining them, and making sure that all are about to do the same. torch.distributed is the engine."""

import atexit
import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packhorse.errors import UserError
from packhorse.mesh import AXES, Mesh
from packhorse.runtime.board import Board
from packhorse.runtime.transport import Transport

TIMEOUT = timedelta(minutes=5)  # that a rank waits for another one


class Ranks:
    """All ranks of the mesh, seen by this one. axes: axis of the mesh, "world" being all ranks, -> the transport over it; an axis of one rank has
    none, and axes over the same ranks share one. transport: over the world.

    timeout: that it waits for another rank. purpose: what these collectives are for, where a process has several such objects.
    """

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, timeout: timedelta = TIMEOUT, purpose: str = "step"):
        _join(mesh, rank, device)
        self.mesh, self.rank, self.device = mesh, rank, device
        self.board = Board(dist.PrefixStore(f"packhorse {purpose}", dist.distributed_c10d._get_default_store()), rank, mesh.world_size)
        self.axes = self._transports(timeout)
        self.transport = self.axes["world"]
        self.board.watch(self.transports)
        words = 2 if mesh.tp == 1 else 3
        self.greeting = torch.zeros(words, dtype=torch.int64, device=device)
        self.greetings = torch.zeros(mesh.world_size, words, dtype=torch.int64, device=device)

    def _transports(self, timeout: timedelta) -> dict[str, Transport]:
        """Every rank makes every group of the mesh, in one order, and keeps those that it is in."""
        made: dict[tuple[int, ...], Transport | None] = {}
        found = {}
        for axis in AXES:
            for members in self.mesh.groups(axis):
                if len(members) == 1:
                    continue
                if members not in made:
                    group = dist.new_group(list(members), timeout, "nccl" if self.device.type == "cuda" else "gloo")
                    mine = self.rank in members
                    made[members] = Transport(group, len(members), members.index(self.rank), self.board.look, members) if mine else None
                if (transport := made[members]) is not None:
                    found[axis] = transport
        return found

    @property
    def transports(self) -> list[Transport]:
        """Each once."""
        return list(dict.fromkeys(self.axes.values()))

    @property
    def sent_bytes(self) -> int:
        """By this rank so far, over all axes."""
        return sum(transport.sent_bytes for transport in self.transports)

    def all_gather(self, own: Tensor, tag: str, axis: str = "world") -> Tensor:
        """own (n,) of every rank of an axis -> (ranks, n)."""
        if axis not in self.axes:
            return own.reshape(1, -1)
        transport = self.axes[axis]
        whole = torch.empty(transport.num_ranks, own.numel(), dtype=own.dtype, device=own.device)
        transport.now(tag, transport.all_gather, own, whole)
        return whole

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's dense tensor to all, in place."""
        dist.broadcast(tensor, group_src=0, group=self.transport.group)

    def texts(self, own: str, tag: str) -> list[str]:
        """Every rank's text, none of them empty, in the order of the ranks."""
        encoded = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8).to(self.device)
        lengths = self.all_gather(torch.tensor([len(encoded)], device=self.device), f"lengths of {tag}").view(-1)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=self.device)
        padded[: len(encoded)] = encoded
        found = self.all_gather(padded, tag).cpu()
        return [row[:n].numpy().tobytes().decode() for row, n in zip(found, lengths.tolist())]

    def require_same(self, description: Mapping[str, Any]) -> None:
        """Raises UserError, on every rank, if the ranks describe what they are about to do in different words; names the first difference."""
        first, *others = (json.loads(text) for text in self.texts(json.dumps(dict(description)), "descriptions"))
        for rank, other in enumerate(others, 1):
            for name in first:
                if first[name] != other.get(name):
                    raise UserError(
                        f"the ranks of this job were not given the same: {name} is {_short(first[name])} on rank 0 and {_short(other.get(name))} on "
                        f"rank {rank}; start every rank with the same code, model, optimizer and settings (only its part of the batch is its own)"
                    )

    def greet(self, step: int, doing: int, batch: int | None = None) -> None:
        """Before a step: every rank tells the number of the step, what it is going to run, as a number, and with several tp ranks its batch, as one.

        Raises UserError, on every rank, if they differ, or the batches of the tp ranks of a dp rank do.
        """
        self.board.step = step
        self.greeting.copy_(torch.tensor([step, doing, batch][: len(self.greeting)]))
        self.transport.now(f"greeting of step {step}", self.transport.all_gather, self.greeting, self.greetings)
        steps, what = self.greetings[:, 0].tolist(), self.greetings[:, 1].tolist()
        for rank in range(1, len(steps)):
            if steps[rank] != steps[0]:
                raise UserError(
                    f"rank 0 is at step {steps[0]} and rank {rank} at step {steps[rank]}: every rank has to take every step; give "
                    "all of them as many batches, and load the same checkpoint on all"
                )
            if what[rank] != what[0]:
                raise UserError(
                    f"step {steps[0]}: rank {rank} is about to run other collectives than rank 0, because its model or batch is of "
                    "another kind; give every rank batches of the same structure, and the same model"
                )
        for group in self.mesh.groups("tp") if self.mesh.tp > 1 else ():
            batches = self.greetings[group[0] : group[-1] + 1, 2].tolist()
            if len(set(batches)) > 1:
                other = next(rank for rank, batch in zip(group, batches) if batch != batches[0])
                raise UserError(
                    f"step {steps[0]}: rank {other} was given another batch than rank {group[0]}; ranks {group[0]} to {group[-1]} are tp ranks of "
                    f"one dp rank and work on one batch: choose a rank's batch by its dp rank (rank // {self.mesh.tp}), not by its rank"
                )


def _join(mesh: Mesh, rank: int, device: torch.device) -> None:
    """Initialises torch.distributed if nobody has; it ends at exit."""
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise UserError(
                f"the plan is for {mesh.world_size} ranks (mesh dp={mesh.dp}, tp={mesh.tp}), and this process was not started as one of several: "
                f"{', '.join(missing)} not set; start it with torchrun --nproc-per-node {mesh.world_size}, or plan for one rank"
            )
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
        atexit.register(_leave)
    if dist.get_world_size() != mesh.world_size or dist.get_rank() != rank:
        raise UserError(
            f"the plan is for rank {rank} of {mesh.world_size} (mesh dp={mesh.dp}, tp={mesh.tp}), and this process is rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; give packhorse.plan a mesh of {dist.get_world_size()} ranks, or start as many processes as it has"
        )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
