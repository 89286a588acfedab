"""Where each value of one graph lives, before offsets: in persistent storage, in the arena, or in memory that a kernel allocated.

Decided here, in this order (Chen et al. 2016, section 3: in-place operations and memory sharing, before the step runs):
 1. results of kernels that update persistent memory in place take their argument's place;
 2. an output of the graph is written straight to where it persists, if nothing reads the old contents after that; else it is copied there;
 3. a result takes over the storage of an argument that dies at its node, where the operator allows it (`in_place`);
 4. what is left gets a buffer in the arena (`share`: buffers may share bytes when their lifespans do not overlap),
    or, where the kernel allocates itself, an external slot for its whole life; what is copied to the host, or computed there, gets a buffer in
    a pool there.
"""

from dataclasses import dataclass, field

from packhorse.graph.ir import Graph, Node, Ref, Value
from packhorse.graph.liveness import Lifespan, lifespans, reads, unread
from packhorse.graph.operators import operator

Places = dict[tuple[str, str], tuple[str, int, tuple[int, ...]]]  # (role, target) -> (run, byte offset, strides in elements)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a storage lives. space: "persistent" (key = run), "batch" (key = leaf), "arena" or "host" (key = buffer), "external" (key = slot)."""

    space: str
    key: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Storage:
    """One buffer of the arena or of the host's pool, or external slot: which roots live in it, over which times, and how large it is."""

    name: str
    space: str
    lower: int
    upper: int
    size: int
    roots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyOut:
    """After the node at `time`: copy a value to where it persists."""

    time: int
    name: str
    home: Home
    target: tuple[str, str]  # (role, target) of the graph's output
    strides: tuple[int, ...]  # of the persistent tensor, in elements


@dataclass(frozen=True)
class Placement:
    """homes: root name -> Home. storages: arena buffers and external slots. hollow_bytes: the largest value of which a node reads only the shape
    (at run time it points at memory that is reserved and never touched)."""

    homes: dict[str, Home]
    storages: tuple[Storage, ...]
    copies: tuple[CopyOut, ...]
    scratch: dict[int, str] = field(default_factory=dict)  # time -> buffer name
    hollow_bytes: int = 0


class _Placer:
    def __init__(self, graph: Graph, places: Places, in_place: bool = True):
        self.graph, self.places, self.in_place = graph, places, in_place
        self.values = graph.values
        self.handed = {self.values[out.name].root for out in graph.outputs if out.role != "random"}  # roots of what the graph hands out
        self.homes: dict[str, Home] = {}
        self.living: dict[Home, list[str]] = {}  # persistent home -> the roots in it
        self.group: dict[str, str] = {}  # root -> the root that founded its storage
        self.last_read: dict[str, int] = {}  # root -> time of the last read of its contents, inputs included
        self.maker: dict[str, int] = {}  # root -> time of the node that defines it
        for time, node in enumerate(graph.nodes):
            for value in node.outputs:
                if value is not None and value.base is None:
                    self.maker[value.name] = time
            if not node.is_view:
                for name in reads(node):
                    self.last_read[self.values[name].root] = time
        self.copies: list[CopyOut] = []
        self.spans: dict[str, Lifespan] = {}

    def place_inputs(self) -> None:
        for given in self.graph.inputs:
            if given.role == "random":
                continue
            if given.role == "batch":
                self.homes[given.value.name] = Home("batch", given.target)
            else:
                run, offset, _ = self.places[given.role, given.target]
                self.settle(given.value.name, Home("persistent", run, offset))

    def settle(self, root: str, home: Home) -> None:
        self.homes[root] = home
        self.living.setdefault(home, []).append(root)

    def place_updates(self) -> None:
        """Step 1. Where the result is not what its argument becomes, or the old contents are read later, the kernel works on a copy."""
        kept = {(out.name, Home("persistent", *self.places[out.role, out.target][:2])) for out in self.graph.outputs if out.role != "random"}
        for time, node in enumerate(self.graph.nodes):
            for result, position in operator(node.op).updates:
                out, arg = node.outputs[result], node.args[position]
                if out is None or not isinstance(arg, Ref):
                    continue
                root = self.values[arg.name].root
                home = self.homes.get(root)
                if home is not None and (out.name, home) in kept and self.last_read.get(root, -1) <= time and self._whole(self.values[arg.name]):
                    self.settle(out.name, home)

    def place_outputs(self) -> None:
        """Step 2."""
        old = {(i.role, i.target): i.value for i in self.graph.inputs}
        for out in self.graph.outputs:
            if out.role == "random":
                continue
            run, offset, strides = self.places[out.role, out.target]
            home = Home("persistent", run, offset)
            value, before = self.values[out.name], old.get((out.role, out.target))
            if self.homes.get(value.root) == home and value.base is None:
                continue  # step 1 has put it there, or the graph hands an input back as it is
            time = self.maker.get(value.root)
            if self._may_be_made_at(home, value, strides, before):
                self.settle(value.root, home)
                self._make_argument_there(value, home, strides, before)
                continue
            last = max((self.last_read.get(root, -1) for root in self.living.get(home, ())), default=-1)
            self.copies.append(CopyOut(max(last, -1 if time is None else time, 0), out.name, home, (out.role, out.target), strides))
        # an output copied out as soon as it may be lives no longer than its readers and its copy
        self.spans = lifespans(self.graph)
        times: dict[str, list[int]] = {}
        for copy in self.copies:
            times.setdefault(self.values[copy.name].root, []).append(copy.time)
        for root, copied in times.items():
            if root in self.spans:
                # a copy after a later node must find the value untouched: it stays alive over that node, so that nothing takes its storage over
                ends = [time + (1 if time == self.maker[root] else 2) for time in copied]
                self.spans[root] = Lifespan(self.spans[root].lower, max([self.last_read.get(root, -1) + 1, self.spans[root].lower + 1, *ends]))

    def _may_be_made_at(self, home: Home, value: Value, strides: tuple[int, ...], before: Value | None) -> bool:
        """The node that makes `value` may write it to where it persists, over the old contents `before`."""
        time = self.maker.get(value.root)
        return (
            time is not None
            and value.root not in self.homes
            and operator(self.graph.nodes[time].op).kind != "adopt"
            and self._whole(value)
            and same_layout(value.shape, value.strides, strides)
            and all(self.last_read.get(root, -1) < time for root in self.living.get(home, ()) if before is None or root != before.name)
            and (before is None or self._overwritable(self.graph.nodes[time], time, before, self.values[value.root]))
        )

    def _make_argument_there(self, result: Value, home: Home, strides: tuple[int, ...], before: Value | None) -> None:
        """What a kernel changes in place is made where its result persists, if nobody else reads it; and so on. So is what it may take over, where
        the program finds nothing of worth in that place."""
        time = self.maker[result.root]
        node = self.graph.nodes[time]
        row = operator(node.op)
        empty = self.in_place and before is None and self.living[home] == [result.root]
        of_first = [(0, position) for position in row.in_place if position < len(node.args)] if empty else []
        for index, position in (*row.updates, *of_first):
            out, arg = node.outputs[index], node.args[position]
            if out is None or out.name != result.root or not isinstance(arg, Ref):
                continue
            value = self.values[arg.name]
            last = self.last_read.get(value.root, -1) == time and value.root not in self.handed
            if not last or value.root in self.homes or not self._takes_over_or_updates(node, (index, position), value, out):
                continue
            self.living[home].remove(result.root)
            settled = self._may_be_made_at(home, value, strides, before)
            if settled:
                self.settle(value.root, home)
                self._make_argument_there(value, home, strides, before)
            self.living[home].append(result.root)
            if settled:
                return

    def _takes_over_or_updates(self, node: Node, pair: tuple[int, int], value: Value, out: Value) -> bool:
        return pair in operator(node.op).updates or self._takes_over(node, self.values[value.root], out)

    def _whole(self, value: Value) -> bool:
        """The value covers its root's storage completely and in the order in which it would lie elsewhere."""
        root = self.values[value.root]
        return value.offset == 0 and value.extent_bytes == root.extent_bytes and root.is_dense and value.is_dense

    def _overwritable(self, node: Node, time: int, before: Value, result: Value) -> bool:
        """The node at `time` may write `result` over the old contents `before`."""
        last = self.last_read.get(before.name, -1)
        return last < time or (last == time and self._takes_over(node, before, result))

    def _takes_over(self, node: Node, arg_root: Value, result: Value) -> bool:
        """Every read of arg_root's storage by the node is an in-place argument laid out exactly like the result."""
        row = operator(node.op)
        seen = False
        for position, arg in enumerate(node.args):
            names = [arg.name] if isinstance(arg, Ref) else []
            if isinstance(arg, tuple):
                names = [item.name for item in arg if isinstance(item, Ref)]
            for name in names:
                value = self.values[name]
                if value.root != arg_root.name or position in row.unread:
                    continue
                if position not in row.in_place or (value.shape, value.strides, value.dtype) != (
                    result.shape,
                    result.strides,
                    result.dtype,
                ):
                    return False
                seen = seen or self._whole(value)
        if any(self.values[name].root == arg_root.name for _, arg in node.kwargs for name in ([arg.name] if isinstance(arg, Ref) else [])):
            return False
        return seen

    def share_in_place(self) -> None:
        """Step 3."""
        for time, node in enumerate(self.graph.nodes):
            row = operator(node.op)
            result = node.outputs[0] if node.outputs else None
            if row.kind == "adopt" or not row.in_place or result is None or result.base is not None or result.name in self.homes:
                continue
            for position in row.in_place:
                arg = node.args[position] if position < len(node.args) else None
                if not isinstance(arg, Ref):
                    continue
                root = self.values[self.values[arg.name].root]
                dies = root.name in self.spans and self.spans[root.name].upper == time + 1
                if dies and root.name not in self.homes and result.extent_bytes and self._takes_over(node, root, result):
                    self.group[result.name] = self.group.get(root.name, root.name)
                    break

    def storages(self) -> tuple[list[Storage], dict[int, str]]:
        """Step 4."""
        members: dict[str, list[str]] = {}
        for root in self.maker:
            if root not in self.homes:
                members.setdefault(self.group.get(root, root), []).append(root)
        found = []
        for founder, roots in members.items():
            row = operator(self.graph.nodes[self.maker[founder]].op)
            space = "external" if row.kind == "adopt" else "host" if row.on_host else "arena"
            lower, upper = self.spans[founder].lower, max(self.spans[root].upper for root in roots)
            size = max(self.values[root].extent_bytes for root in roots)
            found.append(Storage(founder, space, lower, upper, size, tuple(roots)))
            for root in roots:
                self.homes[root] = Home(space, founder)
        scratch = {}
        for time, node in enumerate(self.graph.nodes):
            row = operator(node.op)
            size = row.scratch(node, self.values) if row.scratch else 0
            if size:
                scratch[time] = f"scratch {time}"
                found.append(Storage(scratch[time], "host" if row.on_host else "arena", time, time + 1, size, ()))
        return found, scratch

    def hollow_bytes(self) -> int:
        looked_at = [self.values[name] for node in self.graph.nodes for name in unread(node)]
        return max((v.extent_bytes for v in looked_at if self.homes[v.root].space in ("arena", "external")), default=0)


def same_layout(shape: tuple[int, ...], ours: tuple[int, ...], theirs: tuple[int, ...]) -> bool:
    """Strides that put every element at the same place; those of dims of one element do not matter."""
    return len(ours) == len(theirs) and all(a == b or dim <= 1 for dim, a, b in zip(shape, ours, theirs))


def place(graph: Graph, places: Places, in_place: bool = True) -> Placement:
    """Homes for every root of the graph. `places`: (role, target) -> (run, byte offset) of what persists."""
    placer = _Placer(graph, places, in_place)
    placer.place_inputs()
    placer.place_updates()
    placer.place_outputs()
    if in_place:
        placer.share_in_place()
    storages, scratch = placer.storages()
    return Placement(placer.homes, tuple(storages), tuple(placer.copies), scratch, placer.hollow_bytes())
