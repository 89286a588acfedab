"""The curves of one net at one size: captured once on the meta device, planned by every method. Nothing is allocated."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from packhorse.capture.batch import canonical
from packhorse.capture.capture import capture
from packhorse.capture.flat_storage import Widths, flat_storage
from packhorse.device.device import Device
from packhorse.errors import BudgetError
from packhorse.graph.ir import Graph
from packhorse.planning.choose import make_plan
from packhorse.planning.persistent import Persistent
from packhorse.planning.plan import Options, Plan
from packhorse.reproduce.workloads import Workload

PAPER_BYTES = 7 * 10**9  # section 5.2: a 1,000-layer residual net in "less than 7GB"


@dataclass(frozen=True)
class Curve:
    """How a curve is planned. methods: of recompute/table.py, the leanest of several is taken. budget: of the whole step; or as much as the curve
    `like` takes; or feature_bytes besides what persists. up_to: sizes with more nodes than that are left out."""

    methods: tuple[str, ...]
    in_place: bool = True
    share: bool = True
    budget: str | None = None
    like: str | None = None
    feature_bytes: int | None = None
    up_to: int | None = None


# The paper's five, then ours. "sublinear" is the better one of its k = sqrt(n) segments and its plan with a budget.
CURVES: dict[str, Curve] = {
    "none": Curve(("none",), in_place=False, share=False),
    "in-place": Curve(("none",), share=False),
    "sharing": Curve(("none",)),
    "drop cheap": Curve(("cheap",)),
    "sublinear": Curve(("sqrt", "chen")),
    "recursive": Curve(("recursive",), up_to=250_000),
    "optimal": Curve(("optimal",), like="sublinear", up_to=120_000),
    "optimal, least": Curve(("optimal",), budget="minimum", up_to=120_000),
}
WITHIN_7_GB = "optimal, 7 GB"
MORE: dict[str, Curve] = {WITHIN_7_GB: Curve(("optimal",), feature_bytes=PAPER_BYTES)}


@dataclass(frozen=True)
class Point:
    """One net planned one way. feature_bytes: arena and adopted tensors of the micro-batch, which is what the paper counts: no weights and
    nothing else
    that persists.

    extra: predicted extra seconds of a step over the seconds of the step that computes nothing again; forward: seconds of its forward pass over the
    same; least_extra: no plan in these bytes has less (None where there is no limit). method: which of the curve's methods it is.
    """

    curve: str
    size: int
    method: str
    feature_bytes: int
    extra: float
    forward: float
    least_extra: float | None
    planning_s: float


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


def points(graph: Graph, persistent: Persistent, device: Device, size: int, curves: dict[str, Curve]) -> Iterator[Point]:
    """The curves at one size, in order; one that is like another comes after it. What no plan was found for is left out."""
    peaks: dict[str, int] = {}
    forward = sum(device.seconds(node, graph.values) for node in graph.nodes if node.phase == "forward")
    for name, curve in curves.items():
        if curve.up_to is not None and len(graph.nodes) > curve.up_to:
            continue
        begin = time.process_time()
        try:
            plan = min((_plan(graph, persistent, device, curve, method, peaks) for method in curve.methods), key=feature_bytes)
        except BudgetError:
            continue
        peaks[name] = plan.peak_bytes
        whole, least = plan.keep_everything_seconds, plan.least_overhead_seconds
        extra, bound = plan.overhead_seconds / whole, None if least is None else least / whole
        seconds = time.process_time() - begin
        yield Point(name, size, plan.options.recompute, feature_bytes(plan), extra, forward / whole, bound, seconds)


def _plan(graph: Graph, persistent: Persistent, device: Device, curve: Curve, method: str, peaks: dict[str, int]) -> Plan:
    budget: int | str | None = peaks[curve.like] if curve.like else curve.budget
    if curve.feature_bytes is not None:
        budget = persistent.num_bytes + curve.feature_bytes
    options = Options(method, budget, in_place=curve.in_place, share=curve.share)
    return make_plan({"first": graph}, persistent, options, device)


def at(points: list[Point], curve: str, size: int) -> Point | None:
    """The point of a curve at a size."""
    return next((point for point in points if (point.curve, point.size) == (curve, size)), None)


def in_gigabytes(num_bytes: int) -> float:
    """As the paper counts: 1 GB = 1e9 bytes."""
    return num_bytes / 1e9
