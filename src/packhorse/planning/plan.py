"""Graph -> Plan: where every byte lies, decided before anything runs. A pure function of the graphs and the options. No torch.

Budgets are judged, not estimated: placement and layout measure the real peak of a proposal, and a proposal that does not fit is refused with
the least budget that would.
"""

from dataclasses import dataclass, field
from typing import Any

from packhorse.errors import BudgetError
from packhorse.graph.ir import Graph
from packhorse.memory.buffers import Buffer, Layout
from packhorse.memory.layout import lay_out
from packhorse.mesh import Mesh
from packhorse.planning.flops import graph_flops
from packhorse.planning.persistent import ALIGNMENT, Persistent
from packhorse.planning.placement import Placement, place
from packhorse.units import align_up, format_bytes, parse_bytes


@dataclass(frozen=True)
class GraphPlan:
    """One graph with a home for every value and an offset for every arena buffer."""

    graph: Graph
    placement: Placement
    layout: Layout

    @property
    def arena_bytes(self) -> int:
        return self.layout.height

    def external_bytes_at(self) -> list[int]:
        """Bound on the bytes of external tensors alive while each node runs; one entry a node."""
        change = [0] * (len(self.graph.nodes) + 2)
        for storage in self.placement.storages:
            if storage.space == "external":
                change[storage.lower] += storage.size
                change[min(storage.upper, len(self.graph.nodes) + 1)] -= storage.size
        total, result = 0, []
        for step in change[: max(len(self.graph.nodes), 1)]:
            total += step
            result.append(total)
        return result

    @property
    def external_bytes(self) -> int:
        return max(self.external_bytes_at())


@dataclass(frozen=True)
class Options:
    """What a plan was asked for. Bytes for budget (None: no limit)."""

    recompute: str = "auto"
    budget: int | str | None = None
    num_micro_batches: int = 1
    clip_norm: float | None = None
    mesh: Mesh = field(default_factory=Mesh)
    in_place: bool = True
    share: bool = True


@dataclass(frozen=True)
class Plan:
    """The plan of one training step: `programs` maps "agree", "first", "next", "norm", "update" to their planned graphs.

    All bytes are of this rank. peak_bytes = persistent_bytes + arena_bytes + external_bytes.
    `job` is what `packhorse.compile` needs besides (optimizer, loss, constants); it takes no part in comparisons.
    """

    programs: dict[str, GraphPlan]
    persistent: Persistent
    options: Options
    job: Any = field(default=None, compare=False, repr=False)

    @property
    def persistent_bytes(self) -> int:
        """Parameters, gradients, optimizer states, buffers, metrics, constants and padding."""
        return self.persistent.num_bytes

    @property
    def arena_bytes(self) -> int:
        return max(p.arena_bytes for p in self.programs.values())

    @property
    def external_bytes(self) -> int:
        """Bound on what kernels allocate for their results at one instant."""
        return max(p.external_bytes for p in self.programs.values())

    @property
    def peak_bytes(self) -> int:
        return self.persistent_bytes + self.arena_bytes + self.external_bytes

    @property
    def comm_bytes(self) -> int:
        """Bytes sent by this rank per optimizer step; one rank sends none."""
        return 0

    @property
    def overhead_flops(self) -> int:
        """Flops spent on recomputation per step; this version keeps everything."""
        return 0

    @property
    def flops(self) -> int:
        """Flops of matrix products, convolutions and attention in one optimizer step."""
        later = self.options.num_micro_batches - 1
        return graph_flops(self.programs["first"].graph) + (later * graph_flops(self.programs["next"].graph) if later else 0)

    @property
    def seconds(self) -> None:
        """Predicted seconds of a step: None, as no device file was given."""
        return None

    def __str__(self) -> str:
        from packhorse.planning.ledger import ledger_of

        return str(ledger_of(self))

    def to_dict(self) -> dict[str, Any]:
        """The figures of the plan as JSON-able values; bytes and flops as integers."""
        from packhorse.planning.ledger import ledger_of

        return ledger_of(self).to_dict()


def plan_graph(graph: Graph, persistent: Persistent, options: Options) -> GraphPlan:
    """Homes, then offsets, for one graph."""
    placement = place(graph, persistent.places(), options.in_place)
    buffers = [Buffer(s.name, s.lower, s.upper, s.size) for s in placement.storages if s.space == "arena"]
    return GraphPlan(graph, placement, lay_out(buffers, alignment=ALIGNMENT) if options.share else side_by_side(buffers))


def side_by_side(buffers: list[Buffer]) -> Layout:
    """Every buffer with bytes of its own (`share=False`): what the step would take without memory sharing."""
    offsets, end = {}, 0
    for buffer in buffers:
        offsets[buffer.name] = end
        end += align_up(buffer.size, ALIGNMENT)
    from packhorse.memory.bounds import lower_bound

    return Layout(offsets, end, lower_bound(buffers, ALIGNMENT), ALIGNMENT, "no sharing")


def make_plan(graphs: dict[str, Graph], persistent: Persistent, options: Options, job: Any = None) -> Plan:
    """The plan of a step, judged against the budget.

    graphs: "first" and "update"; "next" if there are several micro-batches, "agree" if there are master weights, "norm" if the update
    needs it.
    Raises BudgetError, with the least budget that works and what is alive at the peak, if the plan does not meet it.
    """
    plan = Plan({name: plan_graph(graph, persistent, options) for name, graph in graphs.items()}, persistent, options, job)
    limit = budget_bytes(options.budget, plan.peak_bytes)
    if limit is not None and plan.peak_bytes > limit:
        raise BudgetError(_too_small(plan, limit))
    return plan


def budget_bytes(budget: int | str | None, keep_everything: int) -> int | None:
    """A budget as bytes: None, a number of bytes, "20GiB", "40%" of the keep-everything peak, or "minimum" of the method."""
    if budget is None or budget == "minimum":
        return None
    if isinstance(budget, str) and budget.strip().endswith("%"):
        text = budget.strip()[:-1]
        try:
            share = float(text)
        except ValueError:
            raise BudgetError(f"cannot read the budget {budget!r}; write a number of bytes, 6GiB, 40% or minimum") from None
        return int(keep_everything * share / 100)
    if isinstance(budget, str):
        return parse_bytes(budget)
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 0:
        raise BudgetError(f"cannot read the budget {budget!r}; write a number of bytes, 6GiB, 40% or minimum")
    return budget


def _too_small(plan: Plan, limit: int) -> str:
    from packhorse.planning.ledger import ledger_of

    ledger = ledger_of(plan)
    alive = "; ".join(f"{format_bytes(row.num_bytes)} {row.name} ({row.place})" for row in ledger.alive[:10])
    return (
        f"the budget of {format_bytes(limit)} ({limit} bytes) is too small: with recompute={plan.options.recompute!r} the least that works is "
        f"{format_bytes(plan.peak_bytes)} ({plan.peak_bytes} bytes), of which {format_bytes(plan.persistent_bytes)} are parameters, gradients, "
        f"optimizer states and buffers; the peak is at {ledger.instant}, where these are alive: {alive}; raise the budget, take a smaller "
        "micro-batch with more of them (num_micro_batches), or an optimizer with less state"
    )
