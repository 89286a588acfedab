"""Plans of a model with fewer blocks, on fewer samples: the real planner on the real model, cut short. What `search` grows from."""

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from packhorse.capture.batch import canonical, tensors_of
from packhorse.capture.capture import capture_whole
from packhorse.capture.flat_storage import Widths
from packhorse.capture.repeats import Run, cut, runs_of_blocks, shortened
from packhorse.capture.stamp import Whole
from packhorse.capture.tensor_plan import sharding_of
from packhorse.device.device import Device
from packhorse.errors import UserError
from packhorse.graph.stamp import Unlike, learn, stamp
from packhorse.parallel.split import Sharding
from packhorse.planning.plan import Options, Plan
from packhorse.residency.saved import saved_values
from packhorse.search.strategy import Needs, Strategy
from packhorse.step_plan import plan_step

# One sample is special (a dim of one element lies anyhow), so what is learned begins with two.
_LEARNED = (2, 3, 4)


@dataclass
class Short:
    """A model whose blocks are alike, to be planned with a few of them. batch: a micro-batch of at least as many samples (dim 0) as are asked for.

    Captures are made once for each depth and number of samples, and shared by all strategies.
    """

    model: torch.nn.Module
    batch: Any
    optimizer: torch.optim.Optimizer
    loss: Callable | None
    widths: Widths
    clip_norm: float | None
    device: Device
    tensor_plan: Any = None
    sequence_parallel: bool = False
    host_budget: int | str | None = None
    captured: dict[tuple[int, int], Whole] = field(default_factory=dict, repr=False)
    learned: dict[int, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.batch = canonical(self.batch)
        self.runs: list[Run] = runs_of_blocks(self.model, 2)
        if len(self.runs) != 1:
            raise UserError(
                f"a search over strategies plans a few of a model's blocks and grows the rest, and this model has {len(self.runs)} runs of equal "
                "blocks (children of a ModuleList that look alike), expected one; plan it as it is (packhorse.plan with a mesh)"
            )

    @property
    def depth(self) -> int:
        """Blocks of the whole model."""
        return self.runs[0].count

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return int(tensors[0].shape[0]) if (tensors := list(tensors_of(self.batch))) else 1

    def first(self, samples: int) -> Any:
        """A batch of the first so many samples."""
        return cut(self.batch, 0, self.samples, samples)

    def plan(self, strategy: Strategy, depth: int, sketch: bool = False) -> Plan:
        """Of the model with `depth` blocks. sketch: without offsets. Raises what `packhorse.plan` raises."""
        options = Options(
            recompute=strategy.recompute,
            num_micro_batches=strategy.num_micro_batches,
            clip_norm=self.clip_norm,
            mesh=strategy.mesh,
            zero_stage=strategy.stage,
            residency=strategy.residency,
            host_budget=self.host_budget if strategy.residency == "offload" else None,
            sketch=sketch,
        )
        whole = self.capture(depth, strategy.samples)
        with shortened(self.runs, [depth]):
            return plan_step(
                self.model,
                self.first(strategy.samples),
                _of(self.optimizer, self.model),
                self.loss,
                self.widths,
                options,
                self.device,
                self.tensor_plan,
                self.sequence_parallel,
                whole,
            )

    def learn(self, depths: Sequence[int], batches: Sequence[int]) -> None:
        """Captures what plans of these depths and numbers of samples need: where there are many of them, three, from which the others follow."""
        many = [samples for samples in batches if samples >= _LEARNED[0]]
        for depth in depths:
            for samples in [samples for samples in batches if samples not in many or len(many) <= len(_LEARNED)]:
                self.capture(depth, samples)
            if len(many) > len(_LEARNED) and self.samples >= _LEARNED[-1]:
                self._learn(depth)

    def _learn(self, depth: int) -> None:
        """Three numbers of samples; the third has to follow from the first two to the last number (graph/stamp.py), else each is captured alone."""
        wholes = [self.capture(depth, samples) for samples in _LEARNED]
        if any(whole.constants for whole in wholes):
            return
        with suppress(Unlike):
            self.learned[depth] = learn(wholes[0].graph, [wholes[1].graph], wholes[2].graph, [{}] * len(wholes))

    def capture(self, depth: int, samples: int) -> Whole:
        """The step with so many blocks and samples; stamped out where it was learned how it grows with the samples."""
        key = depth, samples
        if key not in self.captured and depth in self.learned and samples > _LEARNED[-1]:
            grown = stamp(self.learned[depth], (samples - _LEARNED[0],)).graph
            self.captured[key] = replace(self.captured[depth, _LEARNED[0]], graph=grown)
        if key not in self.captured:
            with shortened(self.runs, [depth]):
                self.captured[key] = capture_whole(self.model, self.first(samples), self.loss, self.widths.compute)
        return self.captured[key]

    def sharding(self, strategy: Strategy) -> Sharding | None:
        """How the model lies over tp ranks. Raises UserError where it cannot."""
        with shortened(self.runs, [2]):
            return sharding_of(self.model, strategy.mesh, 0, self.tensor_plan, self.sequence_parallel)

    def needs(self, strategy: Strategy, depth: int, sketch: bool = False) -> Needs:
        """The figures of that plan."""
        plan = self.plan(strategy, depth, sketch)
        micro = plan.programs["first"]
        sizes = {root: s.size for s in micro.placement.storages if s.space in ("arena", "external") for root in s.roots}
        saved = sum(sizes.get(s.value.name, 0) for s in saved_values(micro.graph))
        return Needs(plan.persistent_bytes, plan.arena_bytes, plan.external_bytes, plan.host_bytes, plan.comm_bytes, plan.seconds, plan.flops, saved)


def _of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The same optimizer over the parameters that are left."""
    there = {id(p) for p in model.parameters()}
    fewer = copy.copy(optimizer)
    fewer.param_groups = [{**group, "params": [p for p in group["params"] if id(p) in there]} for group in optimizer.param_groups]
    return fewer
