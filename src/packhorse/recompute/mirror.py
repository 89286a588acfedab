"""Mirroring: the graph in which chosen forward nodes run again in the backward pass. Chen et al. 2016, Algorithm 2.

A plan of recomputation is an order: indices of the graph's nodes as they run, in which a forward node may occur again. Each occurrence after the
first is a mirror; whoever comes after it reads the newest copy. As all copies of a value are equal in every bit, any order in which each node comes
after what it reads computes the same gradients; orders differ in bytes and seconds alone. A value dies with its last reader, as everywhere.

State is true in mirrors: a random node draws from the saved state that its original consumed, and leaves the generator as it is; batch norm
normalises by the batch and does not touch its running statistics; outputs of the graph come from originals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from packhorse.graph.ir import Const, Graph, Node, Ref, Value, contiguous_strides, map_refs
from packhorse.recompute.facts import Facts

Order = tuple[int, ...]

# Bytes of the state of torch's default generator on the host: a mersenne twister and what it has left over.
RANDOM_STATE_BYTES = 5056
RANDOM_STATE = "packhorse.random_state.default"

_NORM = "aten._native_batch_norm_legit_functional.default"
_NORM_WITHOUT_STATISTICS = "aten._native_batch_norm_legit.no_stats"


def order_of(facts: Facts, counts: Mapping[int, int], within: Sequence[int] | None = None) -> Order:
    """Algorithm 2: the order in which node v has counts[v] mirrors (none where it is missing).

    Marks by hand (`ph.keep`, `ph.drop`) go before the counts. within: only these nodes, in ascending order, and what they read from
    elsewhere is there.
    The k-th mirror of v reads, of each u before it, mirror min(k, counts[u]); the backward pass reads the last ones. Mirrors are appended just before
    the first backward node that needs them, and only as far as it needs them. One addition to the paper: a kept value (its last
    mirror is the k-th) that reads one which is to be dropped again is computed along with it, since later its argument would be gone.
    """
    forward, makes, reads, maker, readers = facts.forward, facts.makes, facts.reads, facts.maker, facts.readers
    count = {node: k for node, k in counts.items() if k and forward[node] and facts.real[node]}
    for node, mark in facts.marks.items():
        count[node] = 0 if mark == "keep" else max(1, count.get(node, 0))
    nodes: Sequence[int] = range(facts.num_nodes) if within is None else within
    inside = None if within is None else set(within)
    emitted: set[tuple[int, int]] = set()
    order: list[int] = []

    def append(wanted: list[tuple[int, int]]) -> None:
        """Everything wanted that does not exist yet, with what it needs, in topological order: by level, then by place in the graph."""
        found: set[tuple[int, int]] = set()
        stack = wanted
        while stack:
            item = stack.pop()
            if item in found or item in emitted:
                continue
            node, level = item
            if inside is not None and node not in inside:
                continue
            found.add(item)
            for s in reads[node]:
                u = maker[s]
                stack.append((u, min(level, count.get(u, 0))))
            if count.get(node, 0) > level > 0:
                for s in makes[node]:
                    stack += [(w, level) for w in readers[s] if forward[w] and count.get(w, 0) == level and w in facts.saved]
        for item in sorted(found, key=lambda item: (item[1], item[0])):
            emitted.add(item)
            order.append(item[0])

    for index in nodes:
        if not facts.real[index]:
            continue
        if not forward[index]:
            wanted = [(maker[s], k) for s in reads[index] if (k := count.get(maker[s], 0))]
            if wanted:
                append(wanted)
        emitted.add((index, 0))
        order.append(index)
    return tuple(order)


def replay(graph: Graph, order: Order) -> Graph:
    """The graph whose nodes run in this order. The k-th mirror of value y is named `.mirror{k}.y`, its node has the phase "recompute".

    Views follow the copy that they show. What nobody reads is left out, an original too, unless it draws random numbers.
    """
    values = graph.values
    viewing = {v.name: node for node in graph.nodes if node.is_view for v in node.outputs if v is not None}
    newest: dict[str, str] = {}  # original root -> name of its newest copy
    number: dict[int, int] = {}  # node -> mirrors so far
    seen_views: dict[tuple[str, str], str] = {}  # (view, copy of its root) -> its name
    mirrored = _repeated(order)
    nodes: list[Node] = []

    def read(name: str) -> str:
        value = values[name]
        root = newest.get(value.root, value.root)
        if value.base is None:
            return root
        if (name, root) not in seen_views:
            prefix = root.removesuffix(value.base)
            node = viewing[name]
            outputs = tuple(None if v is None else replace(v, name=prefix + v.name, base=root) for v in node.outputs)
            seen_views.update({(v.name, root): prefix + v.name for v in node.outputs if v is not None})
            nodes.append(_reading(node, read, outputs, "recompute" if prefix else node.phase))
        return seen_views[name, root]

    for index in order:
        node = graph.nodes[index]
        again = number[index] = number.get(index, -1) + 1
        if not again:
            if node.rng_out is not None and index in mirrored:
                nodes.append(_random_state(node))
                node = replace(node, rng_in=nodes[-1].rng_out)
            nodes.append(_reading(node, read, node.outputs, node.phase))
            newest.update({v.name: v.name for v in node.outputs if v is not None and v.base is None})
        else:
            outputs = tuple(None if v is None else replace(v, name=f".mirror{again}.{v.name}") for v in node.outputs)
            mirror = _pure(_reading(node, read, outputs, "recompute"))
            nodes.append(mirror)
            newest.update({v.name: copy.name for v, copy in zip(node.outputs, mirror.outputs) if v is not None and copy is not None})
    for out in graph.outputs:  # an output that is a view of what nobody else looks at
        if values[out.name].base is not None and (out.name, values[out.name].root) not in seen_views:
            newest[values[out.name].root] = values[out.name].root
            read(out.name)
    return _without_unread(graph.with_nodes(nodes))


def _repeated(order: Order) -> set[int]:
    seen: set[int] = set()
    return {index for index in order if index in seen or seen.add(index)}  # type: ignore[func-returns-value]


def _reading(node: Node, read, outputs: tuple[Value | None, ...], phase: str) -> Node:
    """The node on the newest copies of its arguments."""

    def change(name: str) -> Ref:
        return Ref(read(name))

    args = tuple(map_refs(arg, change) for arg in node.args)
    kwargs = tuple((key, map_refs(arg, change)) for key, arg in node.kwargs)
    return replace(node, args=args, kwargs=kwargs, outputs=outputs, phase=phase)


def _random_state(node: Node) -> Node:
    """Saves the random state that `node` is about to consume, of the generator that it draws from."""
    state = Value(f".state{node.rng_in}", "u8", (RANDOM_STATE_BYTES,), contiguous_strides((RANDOM_STATE_BYTES,)))
    generator = tuple((key, arg) for key, arg in node.kwargs if key == "generator" and isinstance(arg, Const))
    return Node(RANDOM_STATE, (), generator, (state,), node.phase, node.module, node.source, rng_in=node.rng_in, rng_out=f".saved{node.rng_in}")


def _pure(node: Node) -> Node:
    """The mirror without what its original did besides making its results."""
    if node.rng_out is not None:
        return replace(node, kwargs=(*node.kwargs, ("state", Ref(f".state{node.rng_in}"))), rng_in=None, rng_out=None)
    if node.op == _NORM:
        x, weight, bias, _, _, training, momentum, eps = node.args
        assert training is True, "batch norm in evaluation mode has an operator of its own"
        return replace(node, op=_NORM_WITHOUT_STATISTICS, args=(x, weight, bias, True, momentum, eps), outputs=node.outputs[:3])
    return node


def _without_unread(graph: Graph) -> Graph:
    """The graph without nodes that nobody reads; draws from the generator stay."""
    wanted = {out.name for out in graph.outputs}
    kept = []
    for node in reversed(graph.nodes):
        makes = [v for v in node.outputs if v is not None]
        if node.rng_out is not None or not makes or any(v.name in wanted for v in makes):
            wanted.update(node.arg_names())
            wanted.update(v.base for v in makes if v.base is not None)
            kept.append(node)
    return graph.with_nodes(kept[::-1])
