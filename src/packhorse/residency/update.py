"""A pass: where optimizer states and master weights lie on the host, the host computes the update (as in ZeRO-Offload; Ren et al. 2021, section 4).
No torch.

A node that reads what lies on the host is computed there: what it reads from the device comes first, and what of its results lives on the device goes
back. Copies run beside the computation: while the host works on one node, what the next one reads comes, and what the one before has made goes. So
the host holds gradients of two nodes and parameters of three at a time. Elementwise kernels are the same on the host of a CPU, and so are the bits.
"""

from dataclasses import dataclass, field, replace

from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value, map_refs
from packhorse.graph.operators import BY_HOST, FROM_HOST, TO_HOST, WAIT
from packhorse.planning.persistent import Persistent


@dataclass
class _Job:
    """Nodes that the host computes one after another: a node, and those that read its results there. brought: copies to the host, by what they copy;
    back: copies of results to the device."""

    nodes: list[Node] = field(default_factory=list)
    brought: list[tuple[Node, Node]] = field(default_factory=list)  # start, wait
    back: list[tuple[Node, Node]] = field(default_factory=list)


def updated_on_host(graph: Graph, persistent: Persistent) -> Graph:
    """The graph "update" or "agree", with what the host computes."""
    there = {given.value.name for given in graph.inputs if _lies_on_host(given, persistent)}
    if not there:
        return graph
    homes = {out.name: _lies_on_host(out, persistent) for out in graph.outputs}
    copies: dict[str, Value] = {}  # on the device -> on the host
    here: dict[str, str] = {}  # made on the host -> what comes back
    jobs: list[_Job] = []
    by_device: list[Node] = []  # reads nothing that lies on the host
    values = graph.values
    for node in graph.nodes:
        if not there.intersection(node.arg_names()):
            by_device.append(node)
            continue
        made_there = {value.name for job in jobs[-1:] for one in job.nodes for value in one.outputs if value is not None}
        if not made_there.intersection(node.arg_names()):
            jobs.append(_Job())
        job = jobs[-1]
        for name in node.arg_names():
            if name not in there and name not in copies:
                copies[name] = copy = replace(values[name], name=f".there.{name}", base=None)
                job.brought.append(_copied(TO_HOST, name, copy, "to host"))

        def read(name: str) -> Ref:
            return Ref(copies[name].name if name in copies else name)

        job.nodes.append(replace(node, op=BY_HOST[node.op], args=tuple(map_refs(arg, read) for arg in node.args)))
        for value in node.outputs:
            assert value is not None
            there.add(value.name)
            if homes.get(value.name) is False:
                back = replace(value, name=f".here.{value.name}")
                here[value.name] = back.name
                job.back.append(_copied(FROM_HOST, value.name, back, "from host"))
    outputs = tuple(replace(out, name=here.get(out.name, out.name)) for out in graph.outputs)
    return Graph(graph.name, graph.inputs, (*by_device, *_in_order(jobs)), outputs)


def _in_order(jobs: list[_Job]) -> list[Node]:
    """The copies of a job begin before the job in front of it, and the last of its results have come back before the next one ends."""
    found = [start for start, _ in jobs[0].brought]
    for job, after, before in zip(jobs, [*jobs[1:], None], [None, *jobs]):
        found += [start for start, _ in after.brought] if after else []
        found += [*(wait for _, wait in job.brought), *job.nodes, *(start for start, _ in job.back)]
        found += [wait for _, wait in before.back] if before else []
    return [*found, *(wait for _, wait in jobs[-1].back)]


def _copied(op: str, name: str, made: Value, way: str) -> tuple[Node, Node]:
    """A copy of a value, its start and its wait."""
    where = (("axis", "host"), ("tag", f"{way} {name}"))
    return Node(op, (Ref(name),), where, (made,), "update"), Node(WAIT, (Ref(name), Ref(made.name)), where, (), "update")


def _lies_on_host(end: Input | Output, persistent: Persistent) -> bool:
    """What an input or output of the graph stands for, a run or a shard of one, lies there."""
    run = persistent.by_name.get(end.target.partition(" ")[2])
    return run is not None and run.on_host
