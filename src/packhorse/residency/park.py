"""A pass: saved values wait elsewhere between the forward and the backward pass (ZeRO-R; Rajbhandari et al. 2019, section 6.1). No torch.

- P_a: a value that all tensor parallel ranks have is cut after its last use in the forward pass; each rank keeps its slice, and one all-gather brings
  the whole back just before the backward pass uses it.
- P_a+cpu: the slice (with one tensor parallel rank the value itself) is copied to the host and back, beside the computation.

A copy is a node that starts it and one that waits for its end. In between what it reads and writes is alive, so where these nodes stand is what a
copy costs in bytes, and how long it may take without holding anybody up. Bits are moved, never changed.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

from packhorse.device.device import Device
from packhorse.graph.ir import Arg, Graph, Node, Ref, Value, map_refs
from packhorse.graph.operators import ALL_GATHER, FROM_HOST, OWN_SLICE, TO_HOST, VIEWS, WAIT, is_tensor_collective
from packhorse.mesh import Mesh
from packhorse.planning.timeline import seconds_beside
from packhorse.residency.saved import Parked, Residency, Saved, elements_of, saved_values, slice_of
from packhorse.residency.schedule import Absence, absences, leaving_order, pace_of, returning_order


def seconds_by_result(graph: Graph, device: Device, mesh: Mesh) -> dict[str, float]:
    """First result of a node -> what the node takes, a sum over tensor parallel ranks included: the same on all of them."""
    taken = node_seconds(graph, device, mesh)
    return {name: took for node, took in zip(graph.nodes, taken) if (name := _first_result(node)) is not None}


def node_seconds(graph: Graph, device: Device, mesh: Mesh) -> list[float]:
    """For how long each node holds up the computation, as on the first tensor parallel rank."""
    found = []
    for node in graph.nodes:
        found.append(device.seconds(node, graph.values))
        if is_tensor_collective(node.op):
            as_first = replace(node, kwargs=tuple((key, 0 if key == "rank" else given) for key, given in node.kwargs))
            found[-1] += seconds_beside(as_first, graph, device, mesh)
    return found


def begins_of(graph: Graph, seconds: Mapping[str, float]) -> list[float]:
    """Seconds at which each node begins, and the last one ends. seconds: as `seconds_by_result`, of this graph or of one that it was made of."""
    return list(accumulate((seconds.get(_first_result(node) or "", 0.0) for node in graph.nodes), initial=0.0))


def park(graph: Graph, residency: Residency, seconds: Mapping[str, float], device: Device, tp: int, tp_rank: int) -> Graph:
    """The graph in which saved values wait as `residency` says. seconds: as `seconds_by_result`, of the graph before ZeRO's pass: what that adds is
    not the same on all ranks, which have to do all of this in the same order."""
    parked = dict(residency.parked)
    saved = [s for s in saved_values(graph) if s.value.name in parked]
    if not saved:
        return graph
    away = absences(saved, parked, residency.depth, begins_of(graph, seconds), pace_of(device, tp))
    return _Parking(graph, parked, away, tp, tp_rank).run(saved)


class _Parking:
    def __init__(self, graph: Graph, parked: Mapping[str, Parked], away: Mapping[str, Absence], tp: int, tp_rank: int):
        self.graph, self.parked, self.away, self.tp, self.tp_rank = graph, parked, away, tp, tp_rank
        self.before: dict[int, list[Node]] = {}  # index of a node -> what comes before it
        self.back: dict[str, Value] = {}  # root -> the flat value that stands for it once it is back

    def run(self, saved: list[Saved]) -> Graph:
        for s in sorted(saved, key=leaving_order):
            self._leave(s)
        for s in sorted(saved, key=returning_order):
            self._return(s)
        return self.graph.with_nodes(self._reading_what_came_back({s.value.name: s.first for s in saved}))

    def _leave(self, s: Saved) -> None:
        """What happens after the last use in the forward pass."""
        name, how, at, flat = s.value.name, self.parked[s.value.name], s.last + 1, _flat(s.value)
        self._add(at, s.last, VIEWS, (Ref(name),), flat)
        leaving = flat
        if how.shard:
            leaving = slice_of(s.value, self.tp)
            self._add(at, s.last, OWN_SLICE, (Ref(flat.name),), leaving, ("ranks", self.tp), ("rank", self.tp_rank))
        if how.host:
            there = replace(leaving, name=f".host.{name}", base=None)
            self._add(at, s.last, TO_HOST, (Ref(leaving.name),), there, ("axis", "host"), ("tag", f"to host {name}"))
            self._wait(f"to host {name}", "host", self.away[name].gone, leaving, there)

    def _return(self, s: Saved) -> None:
        """What happens before the first use in the backward pass."""
        name, how, away = s.value.name, self.parked[s.value.name], self.away[s.value.name]
        back = slice_of(s.value, self.tp) if how.shard else replace(_flat(s.value), base=None)
        if how.host:
            there, back = replace(back, name=f".host.{name}"), replace(back, name=f".fetched.{name}")
            self._add(away.fetch, s.first, FROM_HOST, (Ref(there.name),), back, ("axis", "host"), ("tag", f"from host {name}"))
            self._wait(f"from host {name}", "host", away.fetched, there, back)
        if how.shard:
            whole = Value(f".whole.{name}", s.value.dtype, (back.num_elements * self.tp,), (1,))
            where = (("axis", "tp"), ("ranks", self.tp), ("rank", self.tp_rank), ("tag", f"gather {name}"))
            self._add(away.whole, s.first, ALL_GATHER, (Ref(back.name),), whole, *where)
            self._wait(f"gather {name}", "tp", away.back, back, whole)
            back = whole
        self.back[name] = back

    def _add(self, at: int, near: int, op: str, args: tuple[Ref, ...], made: Value, *kwargs: tuple[str, Arg]) -> None:
        """A node before the one with index `at`, for the sake of the one with index `near`."""
        place = self.graph.nodes[near]
        phase = "backward" if op in (FROM_HOST, ALL_GATHER) else "forward"
        self.before.setdefault(at, []).append(Node(op, args, kwargs, (made,), phase, place.module, place.source))

    def _wait(self, tag: str, axis: str, at: int, *values: Value) -> None:
        """Until the copy or the gather of that tag has ended, which these values belong to."""
        phase = "forward" if tag.startswith("to host") else "backward"
        node = Node(WAIT, tuple(Ref(value.name) for value in values), (("axis", axis), ("tag", tag)), (), phase)
        self.before.setdefault(at, []).append(node)

    def _reading_what_came_back(self, first: Mapping[str, int]) -> list[Node]:
        """All nodes in order; from its first use on, whoever reads a saved value reads what came back in its place."""
        values = self.graph.values
        seen: set[str] = set()
        nodes: list[Node] = []

        def reading(node: Node, index: int) -> Node:
            def read(name: str) -> Ref:
                value = values[name]
                if index < first.get(value.root, index + 1):
                    return Ref(name)
                again = replace(value, name=f".back.{name}", base=self.back[value.root].name)
                if name not in seen:
                    seen.add(name)
                    nodes.append(Node(VIEWS, (Ref(again.root),), (), (again,), node.phase, node.module, node.source))
                return Ref(again.name)

            args = tuple(map_refs(arg, read) for arg in node.args)
            return replace(node, args=args, kwargs=tuple((key, map_refs(arg, read)) for key, arg in node.kwargs))

        for index, node in enumerate(self.graph.nodes):
            nodes += self.before.get(index, ())
            # views of what came back are made where they are read
            nodes.append(node if node.is_view else reading(node, index))
        return nodes


def _first_result(node: Node) -> str | None:
    """The name of the first result that somebody wants."""
    return next((value.name for value in node.outputs if value is not None), None)


def _flat(value: Value) -> Value:
    """All of a value's storage as one view, gaps included."""
    return Value(f".flat.{value.name}", value.dtype, (elements_of(value),), (1,), value.name)
