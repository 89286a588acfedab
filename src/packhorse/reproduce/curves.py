"""The curves of one net at one size: captured once on the meta device, planned by every method. Nothing is allocated."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from packhorse.capture.batch import canonical
from packhorse.capture.capture import capture
from packhorse.capture.flat_storage import Widths, flat_storage
from packhorse.device.device import Device
from packhorse.graph.ir import Graph
from packhorse.planning.choose import make_plan
from packhorse.planning.persistent import Persistent
from packhorse.planning.plan import Options, Plan
from packhorse.reproduce.workloads import Workload

SUBLINEAR = ("sqrt", "chen")


@dataclass(frozen=True)
class Curve:
    """How a curve is planned. methods: of recompute/table.py, the leanest of several is taken. like: the curve whose peak is the budget."""

    methods: tuple[str, ...]
    in_place: bool = True
    share: bool = True
    budget: str | None = None
    like: str | None = None


# The paper's five, then ours. "sublinear" is the better one of its k = sqrt(n) segments and its plan with a budget.
PAPER = ("none", "in-place", "sharing", "drop cheap", "sublinear")
CURVES: dict[str, Curve] = {
    "none": Curve(("none",), in_place=False, share=False),
    "in-place": Curve(("none",), share=False),
    "sharing": Curve(("none",)),
    "drop cheap": Curve(("cheap",)),
    "sublinear": Curve(SUBLINEAR),
    "recursive": Curve(("recursive",)),
    "optimal": Curve(("optimal",), like="sublinear"),
    "optimal, least": Curve(("optimal",), budget="minimum"),
}


@dataclass(frozen=True)
class Point:
    """One net planned one way. feature_bytes: arena and adopted tensors of the micro-batch, which is what the paper counts; no weights, no gradients of them.

    step_s, extra_s: predicted seconds of the step, and of what is computed again in it. method: which of the curve's methods it is.
    """

    curve: str
    size: int
    method: str
    feature_bytes: int
    step_s: float
    extra_s: float
    planning_s: float

    @property
    def extra(self) -> float:
        """Extra seconds over those of the step that computes nothing again."""
        return self.extra_s / (self.step_s - self.extra_s)


def feature_bytes(plan: Plan) -> int:
    """Arena and adopted tensors of the micro-batch."""
    return plan.programs["first"].arena_bytes + plan.programs["first"].external_bytes


def captured(workload: Workload, size: int) -> tuple[Graph, Persistent]:
    """The micro-batch of the net at that size and what the step keeps, with plain SGD."""
    with torch.device("meta"):
        model, batch = workload.make(size)
    got = capture(model.train(), canonical(batch), None)
    persistent, _ = flat_storage(model, torch.optim.SGD(model.parameters(), lr=0.0), got, None, Widths(None, None, False))
    return got.first, persistent


def points(graph: Graph, persistent: Persistent, device: Device, size: int, names: tuple[str, ...] = tuple(CURVES)) -> Iterator[Point]:
    """The curves `names` at one size, in the order of CURVES. A curve that is like another needs that one too."""
    peaks: dict[str, int] = {}
    for name in names:
        curve = CURVES[name]
        budget = peaks[curve.like] if curve.like else curve.budget
        begin = time.process_time()
        plans = []
        for method in curve.methods:
            options = Options(method, budget, in_place=curve.in_place, share=curve.share)
            plans.append(make_plan({"first": graph}, persistent, options, device))
        plan = min(plans, key=feature_bytes)
        peaks[name] = plan.peak_bytes
        seconds = time.process_time() - begin
        yield Point(name, size, plan.options.recompute, feature_bytes(plan), plan.seconds, plan.overhead_seconds, seconds)
