"""ZeRO-DP as a pass over the graphs of a step (Rajbhandari et al. 2019, section 5). No torch.

A run of model states is cut into as many equal shards as there are ranks; rank i owns the i-th.

- P_os (5.1): the optimizer updates this rank's shard, and the updated parameters are gathered at the end of the step.
- P_os+g (5.2): a gradient is reduced to the ranks that own it as soon as the backward pass has made it, in buckets of constant size, and its
  memory is free after that.
- P_os+g+p (5.3): the parameters of a unit are gathered just before the forward pass uses them and discarded after it. The backward pass gathers
  them once more: that gather is the mirror of the first, like any other value that is computed again (Chen et al. 2016, Algorithm 2).

Every collective is a node that starts it, and a `wait` node for its end: in between it runs beside the computation, and what it reads and writes is
alive. All ranks come to the same collectives in the same order, which depends on the model, the mesh and the stage alone.

With tensor parallelism the graphs are those of a tp rank (parallel/split.py), and all of this goes on among the dp ranks that have the same parts.
One dp rank has nobody to share with: the pass leaves its graphs as they are.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Arg, Graph, Input, Node, Output, Ref, Value
from packhorse.graph.operators import (
    ALL_GATHER,
    ALL_GATHER_OTHERS,
    ALL_REDUCE,
    MAX_REDUCED,
    REDUCE_SCATTER,
    REDUCE_SCATTER_OWN,
    VIEWS,
    WAIT,
    is_collective,
)
from packhorse.parallel.partition import Partition
from packhorse.parallel.pieces import BUCKET_BYTES, bucket_bytes, own_pieces
from packhorse.parallel.split import Sharding
from packhorse.parallel.tensor.spread import Gathered
from packhorse.planning.persistent import Persistent, Run, seen_by
from packhorse.planning.placement import same_layout
from packhorse.recompute.mirror import replay

BUCKET = ".bucket."  # begins the name of what a reduction sends and receives through
UNDER_WAY = 2  # reductions at one time


@dataclass(frozen=True)
class Gathering:
    """How parameters are gathered. units: so many are whole at one time at most: the one in use, one that is on its way, and those that are kept, so
    that they need no second gather. ahead: each gather starts as early as that allows, else at the first use."""

    units: int = 2
    ahead: bool = False


@dataclass(frozen=True)
class Zero:
    """The pass for the programs of one step. persistent: what this rank holds; whole: what one dp rank alone would hold, which methods of
    recomputation count with. sharding: how the model lies over tp ranks, if there are several; gathered: what they gather because an operator has no
    rule for parts."""

    partition: Partition
    persistent: Persistent
    whole: Persistent
    sharding: Sharding | None = None
    gathered: tuple[Gathered, ...] = ()

    def seen_by(self, rank: int) -> "Zero":
        """The pass of another dp rank."""
        return replace(self, partition=replace(self.partition, rank=rank), persistent=seen_by(self.persistent, rank))

    @property
    def is_alone(self) -> bool:
        """No other dp rank has the same parts of the model."""
        return self.partition.num_ranks == 1

    def place(self, axis: str) -> tuple[int, int]:
        """(ranks on an axis of the mesh, which of them this one is)."""
        dp, dp_rank = self.partition.num_ranks, self.partition.rank
        tp, tp_rank = (self.sharding.degree, self.sharding.rank) if self.sharding else (1, 0)
        return {"dp": (dp, dp_rank), "world": (dp * tp, dp_rank * tp + tp_rank)}[axis]

    def names(self, num_micro_batches: int) -> tuple[str, ...]:
        """The programs of the micro-batches: where gradients are reduced once a step (stages 0 and 1), the last one is a program of its own."""
        if num_micro_batches == 1:
            return ("first",)
        if self.partition.shards_gradients or self.is_alone:
            return ("first", "next")
        return ("first", "last") if num_micro_batches == 2 else ("first", "next", "last")

    @property
    def gatherings(self) -> tuple[Gathering, ...]:
        """Ways to gather, the one that holds the most first: all units stay whole once they are gathered, or half of them, and so on to two, and two
        with gathers at their first use."""
        if not self.partition.shards_parameters:
            return (Gathering(),)
        units, found = len(set(self.partition.units.values())), []
        while units > Gathering.units:
            found.append(Gathering(units, True))
            units = -(-units // 2)
        return (*found, Gathering(ahead=True), Gathering())

    def micro_batch(self, name: str, graph: Graph, num_micro_batches: int, gathering: Gathering) -> Graph:
        """A micro-batch's graph as this rank runs it."""
        if self.partition.shards_parameters:
            graph = gather_parameters(graph, self, gathering)
        if not self.is_alone and (self.partition.shards_gradients or name == self.names(num_micro_batches)[-1]):
            graph = reduce_gradients(graph, self, name == "first")
        return graph

    def evaluation(self, graph: Graph) -> Graph:
        """A forward pass as this rank runs it."""
        return gather_parameters(graph, self, Gathering()) if self.partition.shards_parameters else graph

    def waiting(self, tag: str, *names: str, axis: str = "dp") -> Node:
        """Until the collective `tag` has ended, which these values belong to."""
        return Node(WAIT, tuple(Ref(name) for name in names), (("axis", axis), ("tag", tag)), (), "update")

    def collective(
        self,
        op: str,
        args: tuple[Arg, ...],
        outputs: tuple[Value, ...],
        tag: str,
        *more: tuple[str, Arg],
        phase: str = "update",
        axis: str = "dp",
    ) -> Node:
        """What starts it."""
        ranks, rank = self.place(axis)
        where = (("axis", axis), ("ranks", ranks), ("rank", rank), ("tag", tag))
        return Node(op, args, (*where, *more), outputs, phase)


# -- 5.1: optimizer states ------------------------------------------------------------------------------------------------------------


def gather_updated(graph: Graph, zero: Zero) -> Graph:
    """After the update of a shard of parameters that are held whole, the other shards come from their owners."""
    nodes, outputs = list(graph.nodes), list(graph.outputs)
    for out in graph.outputs:
        run = zero.persistent.by_name.get(out.target.removeprefix("shard ")) if out.role == "param" else None
        if run is None or not out.target.startswith("shard ") or run.whole:
            continue
        itemsize = ITEMSIZE[run.dtype]
        before = Value(f".before.{run.name}", run.dtype, (run.own_offset // itemsize,), (1,))
        after = Value(f".after.{run.name}", run.dtype, ((run.num_bytes - run.own_offset - run.shard_bytes) // itemsize,), (1,))
        tag = f"gather {run.name}"
        nodes.append(zero.collective(ALL_GATHER_OTHERS, (Ref(out.name),), (before, after), tag))
        outputs += [Output(v.name, "param", f"{word} {run.name}") for word, v in (("before", before), ("after", after)) if v.num_elements]
    return Graph(graph.name, graph.inputs, tuple(_with_waits(nodes, zero)), tuple(outputs))


def over_ranks(value: Value, name: str, zero: Zero, axis: str = "dp") -> tuple[Value, list[Node]]:
    """A scalar of every rank of an axis as one tensor (ranks,), and the nodes that make it."""
    every = Value(name, value.dtype, zero.place(axis)[:1], (1,))
    tag = f"gather {value.name}"
    return every, [zero.collective(ALL_GATHER, (Ref(value.name),), (every,), tag, axis=axis), zero.waiting(tag, every.name, axis=axis)]


def loss_graph(loss: Value, zero: Zero) -> Graph | None:
    """The graph "loss": the mean of the dp ranks' losses, the same on every rank, and the losses themselves. None for one dp rank: its loss is that
    mean. All tp ranks of a dp rank have computed the same loss."""
    if zero.is_alone:
        return None
    every, nodes = over_ranks(loss, "losses", zero)
    mean = Value("mean_loss", loss.dtype, (), ())
    nodes.append(Node("aten.mean.default", (Ref(every.name),), (), (mean,), "update"))
    inputs = (Input(Value(loss.name, loss.dtype, (), ()), "metric", "loss"),)
    return Graph("loss", inputs, tuple(nodes), (Output(every.name, "metric", "losses"), Output(mean.name, "metric", "loss")))


# -- 5.2: gradients -------------------------------------------------------------------------------------------------------------------


def reduce_gradients(graph: Graph, zero: Zero, is_first: bool) -> Graph:
    """The sums of all ranks' gradients where they are owned. is_first: of the step's micro-batches; a later one adds to what is there.

    Stage 0 gives every rank the sums, by the same sums and a gather of them, so that all stages have the same bits.
    """
    maker = {v.name: time for time, node in enumerate(graph.nodes) for v in node.outputs if v is not None}
    home = {target: run for run in zero.persistent.runs if run.kind == "gradients" for target in run.offsets}
    slots = {slot.target: slot.value for run in home.values() for slot in run.layout.slots}
    found = [out for out in graph.outputs if out.role == "grad" and out.target in home]
    found.sort(key=lambda out: maker[graph.values[out.name].root])
    after: dict[int, list[Node]] = {}
    inputs, outputs = list(graph.inputs), [out for out in graph.outputs if out not in found]
    seen: set[str] = set()
    for run, group in _groups(found, home, slots):
        ready = max(maker[graph.values[out.name].root] for out in group)
        nodes = after.setdefault(ready, [])
        names = []
        for out in group:
            value, wanted = graph.values[out.name], slots[out.target]
            if value.base is not None:  # seen as soon as its root exists
                value = replace(value, name=f".grad.{out.target}")
                nodes.append(Node(VIEWS, (Ref(value.root),), (), (value,), "backward"))
            if value.root in seen or not same_layout(wanted.shape, value.strides, wanted.strides):
                copy = replace(wanted, name=f".own.{out.target}", dtype=value.dtype)
                nodes.append(Node("aten.clone.default", (Ref(value.name),), (), (copy,), "backward"))
                value = copy
            seen.add(value.root)
            names.append(value.name)
        start, sums = _reduction(run, group, names, slots, zero)
        nodes.append(replace(start, module=graph.nodes[ready].module))
        for target, value in sums:
            if is_first or not zero.partition.shards_gradients:
                outputs.append(Output(value.name, "grad", target))
                continue
            before, total = replace(value, name=f".grad_before.{target}"), replace(value, name=f".grad_total.{target}")
            inputs.append(Input(before, "grad", target))
            nodes.append(Node("aten.add.Tensor", (Ref(before.name), Ref(value.name)), (), (total,), "backward"))
            outputs.append(Output(total.name, "grad", target))
    nodes = [*after.get(-1, ())]
    for time, node in enumerate(graph.nodes):
        nodes += [node, *after.get(time, ())]
    return Graph(graph.name, tuple(inputs), tuple(_with_waits(nodes, zero)), tuple(outputs))


def _reduction(run: Run, group: list[Output], names: list[str], slots: dict[str, Value], zero: Zero) -> tuple[Node, list[tuple[str, Value]]]:
    """What starts the reduction of some gradients of a run, and target -> where this rank's sums will be."""
    part, itemsize = zero.partition, ITEMSIZE[run.dtype]
    offsets = tuple(run.offsets[out.target] // itemsize for out in group)
    sizes = tuple(slots[out.target].num_elements for out in group)
    shard = run.shard_bytes // itemsize
    size = bucket_bytes(offsets, sizes, shard, part.num_ranks, itemsize)
    tag = f"reduce {group[0].target}" + (f" .. {group[-1].target}" if len(group) > 1 else "")
    bucket = Value(f"{BUCKET}{group[0].target}", "u8", (size,), (1,))
    if part.shards_gradients:
        sums = [
            (group[index].target, Value(f".reduced.{group[index].target}", run.dtype, (count,), (1,)))
            for index, _, count in own_pieces(offsets, sizes, shard, part.rank)
        ]
        op = REDUCE_SCATTER
    else:
        sums = [(out.target, replace(slots[out.target], name=f".reduced.{out.target}")) for out in group]
        op = f"{REDUCE_SCATTER_OWN if part.shards_states else ALL_REDUCE}{len(group)}"
    more: tuple[tuple[str, Arg], ...] = (("offsets", offsets), ("shard", shard))
    args = tuple(Ref(name) for name in names)
    return zero.collective(op, args, (*(value for _, value in sums), bucket), tag, *more, phase="backward"), sums


def _groups(found: list[Output], home: dict[str, Run], slots: dict[str, Value]) -> Iterable[tuple[Run, list[Output]]]:
    """Gradients that are reduced together: of one run, in the order in which the backward pass makes them, until they fill a bucket."""
    open_: dict[str, tuple[list[Output], int]] = {}
    closed: list[tuple[int, Run, list[Output]]] = []
    for place, out in enumerate(found):
        run = home[out.target]
        group, held = open_.pop(run.name, ([], 0))
        group = [*group, out]
        held += slots[out.target].extent_bytes
        if held >= BUCKET_BYTES or len(group) == MAX_REDUCED:
            closed.append((place, run, group))
        else:
            open_[run.name] = (group, held)
    position = {out.target: place for place, out in enumerate(found)}
    closed += [(position[group[-1].target], home[group[0].target], group) for group, _ in open_.values()]
    return [(run, group) for _, run, group in sorted(closed, key=lambda item: item[0])]


# -- 5.3: parameters ------------------------------------------------------------------------------------------------------------------


def gather_parameters(graph: Graph, zero: Zero, gathering: Gathering) -> Graph:
    """Each unit of parameters is gathered before its use, and again where it is used after it was discarded."""
    runs = [run for run in zero.persistent.runs if run.kind == "parameters" and run.whole]
    home = {target: run for run in runs for target in run.offsets}
    given = {i.value.name: (i.value, home[i.target], i.target) for i in graph.inputs if i.role == "param" and i.target in home}
    used = dict.fromkeys(run.name for _, run, _ in given.values())
    by_name = zero.persistent.by_name

    def shown(value: Value) -> Value:
        """A view of a parameter is one of the gathered unit."""
        if value.base not in given:
            return value
        _, run, target = given[value.base]
        return replace(value, base=_gathered(run), offset=value.offset + run.offsets[target])

    gathers: list[Node] = []
    inputs = [i for i in graph.inputs if i.value.name not in given]
    for name in used:
        run = by_name[name]
        itemsize = ITEMSIZE[run.dtype]
        inputs.append(Input(Value(f".shard.{name}", run.dtype, (run.num_bytes // itemsize,), (1,)), "param", f"shard {name}"))
        whole = Value(_gathered(run), run.dtype, (run.layout.num_bytes // itemsize,), (1,))
        gathers.append(zero.collective(ALL_GATHER, (Ref(f".shard.{name}"),), (whole,), f"gather {name}", phase="forward"))
        members = [(value, target) for value, at, target in given.values() if at is run]
        views = tuple(replace(value, base=whole.name, offset=run.offsets[target]) for value, target in members)
        gathers.append(Node(VIEWS, (Ref(whole.name),), (), views, "forward"))
    nodes = [replace(node, outputs=tuple(None if v is None else shown(v) for v in node.outputs)) for node in graph.nodes]
    whole_graph = Graph(graph.name, tuple(inputs), (*gathers, *nodes), graph.outputs)

    number = {name: 2 * index for index, name in enumerate(used)}  # run -> its gather's place
    unit_of = {name: zero.partition.units[by_name[name].layout.slots[0].target] for name in used}
    roots = {_gathered(by_name[name]): name for name in used}
    real = _gradients_after([len(gathers) + index for index, node in enumerate(nodes) if not node.is_view], whole_graph, set(roots))
    uses = []
    for index in real:
        reads = (whole_graph.values[name].root for name in whole_graph.nodes[index].arg_names())
        uses.append({unit_of[roots[root]] for root in reads if root in roots})
    starts: dict[int, list[int]] = {}
    for first, unit in _starts(uses, gathering):
        starts.setdefault(first, []).extend(number[name] for name in used if unit_of[name] == unit)
    order = [gather for place, index in enumerate(real) for gather in (*starts.get(place, ()), index)]
    return _with_gather_waits(_tagged(replay(whole_graph, tuple(order))), zero)


def _gradients_after(order: list[int], graph: Graph, parameters: set[str]) -> list[int]:
    """The order in which a node that makes a gradient of parameters comes after its neighbour that reads gathered ones: those go first, and the
    gradient's memory is taken after that. Known by what nobody reads soon. parameters: roots."""
    order = list(order)
    reads = {index: {graph.values[name].root for name in graph.nodes[index].arg_names()} for index in order}
    moved = -1
    for place in range(len(order) - 1):
        node, neighbour = order[place], order[place + 1]
        makes = {v.name for v in graph.nodes[node].outputs if v is not None}
        soon = set().union(*(reads[index] for index in order[place + 1 : place + 4]))
        waits = graph.nodes[node].phase == "backward" and not makes & soon and not reads[node] & parameters
        if waits and reads[neighbour] & parameters and node != moved:
            order[place], order[place + 1], moved = neighbour, node, node
    return order


def _gathered(run: Run) -> str:
    return f".gathered.{run.name}"


def _starts(uses: list[set[str]], gathering: Gathering) -> list[tuple[int, str]]:
    """(place, unit): where a gather of it starts. uses: units that the node at each place reads. A unit is discarded when as many others were used
    since as may be whole: so what the forward pass uses last is still there for the backward pass. A gather starts when a unit before it comes into
    use, as many gathers ahead as there may be units besides the one in use, unless too many would be whole at once."""
    most = gathering.units
    alive: OrderedDict[str, list[int]] = OrderedDict()
    spans: list[tuple[int, int, str]] = []  # first use, last use
    for place, units in enumerate(uses):
        for unit in sorted(units):
            if unit in alive:
                alive[unit][1] = place
                alive.move_to_end(unit)
            else:
                alive[unit] = [place, place]
        while len(alive) > max(most, len(units)):
            unit, (first, last) = alive.popitem(last=False)
            spans.append((first, last, unit))
    spans += [(first, last, unit) for unit, (first, last) in alive.items()]
    spans.sort()
    found = []
    for index, (first, _, unit) in enumerate(spans):
        start = first
        if gathering.ahead:
            earliest = spans[max(0, index - most + 1)][0] if index else 0
            times = sorted({earliest, *(last + 1 for _, last, _ in spans[:index] if earliest <= last + 1 <= first)})
            start = next((t for t in times if sum(last >= t for _, last, _ in spans[:index]) < most), first)
        found.append((start, unit))
    return found


def _tagged(graph: Graph) -> Graph:
    """Each gather of a run under a tag of its own."""
    seen: dict[str, int] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == ALL_GATHER:
            tag = str(dict(node.kwargs)["tag"])
            seen[tag] = seen.get(tag, 0) + 1
            node = replace(node, kwargs=tuple((k, f"{tag} {seen[tag]}" if k == "tag" and seen[tag] > 1 else v) for k, v in node.kwargs))
        nodes.append(node)
    return graph.with_nodes(nodes)


def _with_gather_waits(graph: Graph, zero: Zero) -> Graph:
    """A wait before the first node that reads what is gathered."""
    pending: dict[str, str] = {}  # gathered value -> tag
    nodes = []
    for node in graph.nodes:
        if node.op == ALL_GATHER and node.outputs[0] is not None:
            pending[node.outputs[0].name] = str(dict(node.kwargs)["tag"])
        elif not node.is_view:
            for root in dict.fromkeys(graph.values[name].root for name in node.arg_names()):
                if root in pending:
                    nodes.append(replace(zero.waiting(pending.pop(root), root), phase=node.phase))
        nodes.append(node)
    return graph.with_nodes(nodes)


def _with_waits(nodes: list[Node], zero: Zero) -> list[Node]:
    """A wait for each reduction or gather of updated parameters: before the next but one of them starts, so that UNDER_WAY are at a time, and before
    what reads its result, which comes as late."""
    found: list[Node] = []
    open_: list[tuple[Node, set[str], list[Node]]] = []  # start, what it makes, who reads that

    def close() -> None:
        start, _, readers = open_.pop(0)
        # what is reduced in place has left its arguments when it starts
        in_place = start.op.startswith((REDUCE_SCATTER_OWN, ALL_REDUCE))
        reads = [arg.name for arg in start.args if isinstance(arg, Ref) and not in_place]
        wait = zero.waiting(str(dict(start.kwargs)["tag"]), *reads, *(v.name for v in start.outputs if v))
        found.extend([replace(wait, phase=start.phase), *readers])

    for node in nodes:
        reads = set(node.arg_names())
        source = next((readers for _, makes, readers in open_ if reads & makes), None)
        if source is not None:
            source.append(node)
            continue
        starts = is_collective(node.op) and node.op not in (ALL_GATHER, WAIT)
        if starts and len(open_) == UNDER_WAY:
            close()
        found.append(node)
        if starts:
            open_.append((node, {v.name for v in node.outputs if v is not None}, []))
    while open_:
        close()
    return found
