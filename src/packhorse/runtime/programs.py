"""The programs of a compiled step: those of its plan, and further ones for batches of other sizes or answers, other modes, and evaluation."""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from packhorse.capture.batch import Signature, check_like, signature, tensors_of
from packhorse.capture.capture import Captured, capture, capture_evaluation
from packhorse.capture.questions import Questions
from packhorse.errors import BudgetError, CaptureError
from packhorse.graph.ir import Graph
from packhorse.planning.budget import budget_bytes
from packhorse.planning.choose import MICRO, Finish, choose
from packhorse.planning.persistent import Persistent, make_run, misfit
from packhorse.planning.plan import GraphPlan, Plan, Rest, plan_graph
from packhorse.program.lower import lower
from packhorse.runtime.arena import Arena
from packhorse.runtime.copies import CopyEngine
from packhorse.runtime.executor import BoundProgram, Measured
from packhorse.runtime.job import Job, modes_of
from packhorse.runtime.storage import allocate, load_constants
from packhorse.runtime.transport import Transport
from packhorse.units import format_bytes

MANY_PROGRAMS = 32  # a step with so many is told that it may be making one for each value of something


class Programs:
    """Planned graphs and bound programs by key, over one arena as large as the largest needs.

    A key is (name,) for what is made once ("agree", "norm", "update"), else (name, signature of the batch, modes of the model, number of the set of
    answers).

    runs: run name -> bytes; grows by the constants of further programs, and `persistent` with it. generators: all that programs draw from, by name.
    axes: axis of the mesh -> the transport over it; "host" -> what copies saved values there.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan,
        runs: dict[str, Tensor],
        device: torch.device,
        generators: Mapping[str, Generator],
        axes: Mapping[str, Transport | CopyEngine] | None = None,
    ):
        job: Job = plan.job
        self.generators, self.axes = dict(generators), axes
        self.numbers: dict[tuple, int] = {}
        self.model, self.plan, self.job, self.runs, self.device = model, plan, job, runs, device
        self.persistent: Persistent = plan.persistent
        self.needed = plan.needed or Rest(plan.persistent.num_bytes)  # what ranks decide by, alike on all of them
        self.arena: Arena | None = None
        self.host: Arena | None = None
        self.planned: dict[tuple, GraphPlan] = {}
        self.bound: dict[tuple, BoundProgram] = {}
        self.captured: dict[tuple, list[Captured]] = {}  # (signature, modes) -> what was captured since the plan was made
        self.asked: dict[tuple, list[Questions]] = {}  # (name, signature, modes) -> the questions of each program made for it
        for name, planned in plan.programs.items():
            if name in MICRO:
                self.asked[name, job.signature, job.modes] = [job.questions]
                self.planned[name, job.signature, job.modes, 0] = planned
            else:
                self.planned[(name,)] = planned
        self.bind_all()

    def run(self, name: str) -> dict[str, Measured]:
        """Runs a program that is made once, and what it took by its name; nothing if the plan has none of that name."""
        return {name: self.bound[(name,)].run({})} if (name,) in self.bound else {}

    def collectives(self, keys: list[tuple]) -> int:
        """A number that stands for the collectives of these programs, in order: the same on all ranks that run the same ones. What they carry may
        have another shape on each tp rank, and takes no part."""
        if (number := self.numbers.get(tuple(keys))) is not None:
            return number
        nodes = [dict(node.kwargs) for key in keys for node in self.planned[key].graph.nodes if node.op.startswith("packhorse.")]
        tags = [f"{given['axis']} {given['tag']}" for given in nodes if "tag" in given]
        self.numbers[tuple(keys)] = number = int.from_bytes(hashlib.sha256("\n".join(tags).encode()).digest()[:7], "big")
        return number

    def peak_bytes(self, keys: list[tuple]) -> int:
        """What the programs of these keys need together, with all that persists."""
        plans = [self.planned[key] for key in keys]
        return self.persistent.num_bytes + max(p.arena_bytes for p in plans) + max(p.external_bytes for p in plans)

    def host_bytes(self, keys: list[tuple]) -> int:
        """What they need of the host."""
        return self.persistent.host_bytes + max(self.planned[key].host_bytes for key in keys)

    def key_of(self, name: str, micro: Any) -> tuple:
        """The key of a micro-batch's program: one for its signature, the model's modes, and the answers to what the model asks of its values."""
        given: Signature = signature(micro)
        key = (name, given, modes_of(self.model))
        tensors = tensors_of(micro)
        for number, questions in enumerate(self.asked.get(key, ())):
            if questions.hold(tensors):
                return (*key, number)
        check_like(self.job.signature, given)
        return self._make(name, micro, key)

    def _make(self, name: str, micro: Any, key: tuple) -> tuple:
        """Captures and plans a program for a batch of other sizes or with other answers, for another mode of the model, or for evaluation."""
        if name == "evaluate":
            sharding = None if self.plan.zero is None else self.plan.zero.sharding
            graph, constants, questions, generators = capture_evaluation(self.model, micro, self.job.loss, self.job.widths.compute, sharding)
            if self.plan.zero is not None:
                graph = self.plan.zero.evaluation(graph)
        else:
            captured = self._captured(micro, key[1:])
            found = captured.micro_batches([name])[name]
            assert found is not None
            graph, constants, questions, generators = found, captured.constants, captured.questions, captured.generators
            missing = {target for run in self.persistent.runs if run.kind == "gradients" for target in run.offsets} ^ captured.trained()
            if missing:
                raise CaptureError(
                    f"with this batch other parameters get a gradient than with the planned one ({', '.join(sorted(missing)[:5])}); "
                    "a plan holds for one set of trained parameters: plan again with this batch"
                )
        self.job.check_generators(generators, "with this batch or mode")
        if wrong := misfit(graph, self.persistent if self.plan.zero is None else self.plan.zero.whole):
            raise CaptureError(
                f"with this batch or mode the step computes something of another dtype than planned: {wrong}; return the loss in one dtype, or "
                "plan again with this batch"
            )
        graph, runs = _own_constants(graph, len(self.bound))
        persistent = replace(self.persistent, runs=(*self.persistent.runs, *runs))
        options, limit = self.plan.options, budget_bytes(self.plan.options.budget, self.plan.keep_everything_bytes)
        here = Rest(persistent.num_bytes)
        for known in self.planned.values():
            here = here.along(known)
        if name == "evaluate":
            planned = plan_graph(graph, persistent, options)
        else:
            finish = Finish(persistent, options, self.plan.device, self.plan.zero, name)
            rest = replace(self.needed, persistent_bytes=persistent.num_bytes)
            chosen = choose(graph, persistent, options, self.plan.device, rest, lambda everything: limit, finish)
            planned, self.needed = chosen.laid_out.planned, rest.along(chosen.laid_out)
        peak = here.peak(planned)
        if limit is not None and peak > limit:
            what = "evaluating" if name == "evaluate" else "a step on"
            raise BudgetError(
                f"{what} a batch of this size ({_sizes(key[1])}) needs {format_bytes(peak)} ({peak} bytes), above the "
                f"budget of {format_bytes(limit)}; "
                "pass smaller batches, or plan with this one and a larger budget"
            )
        self.runs.update(allocate(Persistent(tuple(runs)), self.device))
        self.persistent = persistent
        load_constants(Persistent(tuple(runs)), self.runs, {f"{len(self.bound)}/{n}": t for n, t in constants.items()})
        self.asked.setdefault(key, []).append(questions)
        key = (*key, len(self.asked[key]) - 1)
        self.planned[key] = planned
        self.bind_all()
        if len(self.planned) == MANY_PROGRAMS:
            warnings.warn(
                f"this step has made {MANY_PROGRAMS} programs, one for each batch size, each number in a batch and each set of answers to what "
                "the model asks of a batch's values; pass numbers that change as tensors, and pad batches to a few sizes",
                stacklevel=6,
            )
        return key

    def _captured(self, micro: Any, key: tuple) -> Captured:
        """The graphs for a micro-batch: "first" and "next" come from one capture. key: signature and modes."""
        for known in self.captured.get(key, ()):
            if known.questions.hold(tensors_of(micro)):
                return known
        widths, zero = self.job.widths, self.plan.zero
        adds, sharding = (True, None) if zero is None else (not zero.partition.shards_gradients, zero.sharding)
        made = capture(self.model, micro, self.job.loss, self.plan.options.num_micro_batches, widths.compute, widths.grads, adds, sharding)
        self.captured.setdefault(key, []).append(made)
        return made

    def bind_all(self) -> None:
        """Binds programs that are not bound yet; all of them anew where one needs a larger arena (the old one is let go first)."""
        height = self.persistent.floor + max(p.arena_bytes for p in self.planned.values())
        hollow = max(p.placement.hollow_bytes for p in self.planned.values())
        on_host = max(p.host_bytes for p in self.planned.values())
        if on_host > (0 if self.host is None else self.host.capacity):
            self.bound.clear()
            self.host = None
            self.host = Arena(on_host, torch.device("cpu"), pinned=self.device.type != "cpu")
        if self.arena is None or height > self.arena.capacity or hollow > self.arena.hollow.numel():
            self.bound.clear()
            kept = {name: self.runs[name].clone() for name in self.persistent.lent if name in self.runs}
            self.arena = None
            for name in kept:
                del self.runs[name]
            self.arena = Arena(height, self.device, hollow)
            for name, offset in self.persistent.lent_offsets.items():
                self.runs[name] = self.arena.data[offset : offset + self.persistent.by_name[name].num_bytes]
                self.runs[name].copy_(kept[name]) if name in kept else self.runs[name].zero_()
        for key, planned in self.planned.items():
            if key not in self.bound:
                self.bound[key] = self.bind(planned)

    def bind(self, planned: GraphPlan) -> BoundProgram:
        assert self.arena is not None
        return BoundProgram(lower(planned), self.arena, self.runs, self.job.groups(), self.generators, self.axes, self.host)


def _own_constants(graph: Graph, number: int) -> tuple[Graph, list]:
    """The graph with its constants under names of its own, and the runs that hold them."""
    inputs, tensors = [], []
    for given in graph.inputs:
        if given.role == "constant" and given.target != "seed":
            given = replace(given, target=f"{number}/{given.target}")
            tensors.append((given.target, given.value))
        inputs.append(given)
    by_dtype: dict[str, list] = {}
    for target, value in tensors:
        by_dtype.setdefault(value.dtype, []).append((target, value))
    runs = [make_run(f"constant.{dtype}.{number}", "constants", "constant", group) for dtype, group in by_dtype.items()]
    return replace(graph, inputs=tuple(inputs)), runs


def _sizes(given: Signature) -> str:
    return ", ".join(f"{leaf.path} {list(leaf.shape)}" for leaf in given.leaves)
