"""Where each saved value of a micro-batch waits between the forward and the backward pass, as its graph says. No torch."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from packhorse.graph.ir import Graph, Node, Value
from packhorse.graph.liveness import reads
from packhorse.graph.operators import is_collective
from packhorse.planning.plan import Options
from packhorse.units import format_bytes

KEPT, AGAIN, SLICE, HOST, SLICE_ON_HOST = WAYS = ("kept", "computed again", "slice", "on the host", "slice on the host")
NEXT_TO_NOTHING = 0.01  # of the saved bytes: what is cut below it is no saving to speak of
# what residency/park.py calls a saved value while it waits, and once it is back
_PARKED = re.compile(r"\.(flat|slice|host|fetched|whole|back)\.(.+)")
_MIRROR = re.compile(r"\.mirror\d+\.(.+)")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A value that the forward pass makes and the backward pass needs. num_bytes: of all of it; way: one of WAYS; device_bytes, host_bytes: what is
    held for it while it waits; maker: the node that makes it."""

    name: str
    num_bytes: int
    way: str
    device_bytes: int
    host_bytes: int
    maker: Node


def waiting_values(graph: Graph) -> list[Waiting]:
    """Every saved value, the largest first. What collectives bring (parameters that are gathered) is not counted: it is made again by a gather."""
    values = graph.values
    made: dict[str, tuple[Value, Node]] = {}
    slices: dict[str, int] = {}
    there: dict[str, int] = {}
    for node in graph.nodes:
        for value in node.outputs:
            if value is None or value.base is not None:
                continue
            kind, name = parked_as(value.name)
            if kind == "slice":
                slices[name] = value.extent_bytes
            elif kind == "host":
                there[name] = value.extent_bytes
            elif not kind and node.phase == "forward" and not is_collective(node.op):
                made[value.name] = value, node
    read = {values[name].root for node in graph.nodes if node.phase in ("backward", "recompute") and not node.is_view for name in reads(node)}
    needed = {values[name].root for node in graph.nodes if node.phase == "backward" and not node.is_view for name in reads(node)}
    again = {original(root) for root in needed} - needed
    found = []
    for name, (value, node) in made.items():
        size, on_host = value.extent_bytes, there.get(name, 0)
        if name in slices:
            found.append(Waiting(name, size, SLICE_ON_HOST if on_host else SLICE, 0 if on_host else slices[name], on_host, node))
        elif on_host:
            found.append(Waiting(name, size, HOST, 0, on_host, node))
        elif name in read:
            found.append(Waiting(name, size, KEPT, size, 0, node))
        elif name in again:
            found.append(Waiting(name, size, AGAIN, 0, 0, node))
    return sorted(found, key=lambda w: (-w.num_bytes, w.name))


def parked_as(name: str) -> tuple[str, str]:
    """What a value is to the saved value it stands for, and that one's name: (".slice.x" -> "slice", "x"); ("", name) for any other value.

    "slice": this rank's part of it; "host": what waits there; "fetched", "whole": it is back from the host, from all ranks; "flat", "back": views.
    """
    match = _PARKED.fullmatch(name)
    return ("", name) if match is None else (match[1], match[2])


def original(name: str) -> str:
    """The name of the value of which `name` is a mirror; `name` itself if it is none."""
    match = _MIRROR.fullmatch(name)
    return name if match is None else match[1]


@dataclass(frozen=True)
class Tally:
    """What waits elsewhere in the program of a step that parks the most: values and bytes of each way."""

    found: tuple[Waiting, ...]

    def of(self, *ways: str) -> list[Waiting]:
        """The values that wait in one of these ways."""
        return [w for w in self.found if w.way in ways]

    def to_dict(self) -> dict[str, int]:
        """sharded_*: values cut into slices, and bytes before that; offloaded_*: values on the host, whole or as slices, and bytes there."""
        offloaded = self.of(HOST, SLICE_ON_HOST)
        return {
            "sharded_values": len(self.of(SLICE, SLICE_ON_HOST)),
            "sharded_bytes": self._sharded(),
            "offloaded_values": len(offloaded),
            "offloaded_bytes": sum(w.host_bytes for w in offloaded),
        }

    def in_words(self, options: Options) -> str:
        """One line; "" where nobody asked for it and everything waits in place."""
        told = ", ".join(self._group(way) for way in (SLICE, HOST, SLICE_ON_HOST) if self.of(way))
        if options.residency == "shard" and self._sharded() <= NEXT_TO_NOTHING * sum(w.num_bytes for w in self.found):
            some = self.of(SLICE, SLICE_ON_HOST)
            alike = f"no more than {len(some)} of {len(self.found)} saved values ({format_bytes(self._sharded())})" if some else "no saved value"
            return (
                f"residency (shard): nothing to shard: the tp ranks have {alike} alike; under sequence parallelism, where each of them has a part of "
                "the sequence, this is the normal case"
            )
        if told:
            rest = ["in place"] * bool(self.of(KEPT)) + ["computed again"] * bool(self.of(AGAIN))
            return f"residency ({options.residency}): {told}" + (f", all others {' or '.join(rest)}" if rest else "")
        asked = options.residency == "offload" or options.host_budget is not None
        return f"residency ({options.residency}): no saved value waits on the host or as a slice" if asked else ""

    def _group(self, way: str) -> str:
        some = self.of(way)
        cut = "" if way == HOST else f" as slices of {format_bytes(sum(w.device_bytes + w.host_bytes for w in some))}"
        where = "" if way == SLICE else " on the host"
        return f"{len(some)} saved value{'s' * (len(some) > 1)} of {format_bytes(sum(w.num_bytes for w in some))}{cut}{where}"

    def _sharded(self) -> int:
        return sum(w.num_bytes for w in self.of(SLICE, SLICE_ON_HOST))


def tally(graphs: Iterable[Graph]) -> Tally:
    """Of the graph among these that parks the most bytes; the first of several."""
    found = [Tally(tuple(waiting_values(graph))) for graph in graphs]
    return max(found, key=lambda t: sum(w.num_bytes for w in t.of(SLICE, HOST, SLICE_ON_HOST)))
