"""A pass: the graph of one of several tensor parallel ranks (Shoeybi et al. 2019, section 3). No torch.

The graph is captured as one rank would run it. Which parameters are split says the Sharding; what becomes of every other value follows node by node
(rules.py), and where a value is not where a node needs it, a collective moves it (spread.py). So the all-reduces f and g of the paper are not written
anywhere: the gradient of what a column-parallel layer reads is a sum over ranks, and so is what a row-parallel layer gives. Several column-parallel
layers that read one value share one all-reduce, as their gradients are added first.

Sums over ranks are in another order than on one rank. Every other value has the same bits.
"""

from packhorse.errors import BatchError
from packhorse.graph.ir import Graph, Node, Output, Ref
from packhorse.parallel.split import Sharding, Split
from packhorse.parallel.tensor.placed import WHOLE, Place, Sum
from packhorse.parallel.tensor.reshaping import view
from packhorse.parallel.tensor.rules import RULES
from packhorse.parallel.tensor.spread import Gathered, Spread

SMALL_BYTES = 1 << 17  # gradients that are worth a copy to share a collective
_SAME = {"aten.add.Tensor", "aten.t.default", "aten._to_copy.default", "aten.clone.default", "packhorse.add_embedding_backward.default"}


def split_graph(graph: Graph, sharding: Sharding) -> tuple[Graph, list[Gathered]]:
    """The graph of the rank that `sharding` is seen by, and the split values that it gathers because an operator has no rule for parts.

    Raises BatchError if sequences are to be split and the degree does not divide them.
    """
    spread = Spread(graph, sharding, _tokens(graph, sharding) if sharding.sequence else None)
    for entry in graph.inputs:
        if entry.role == "random" and entry.target == "default":
            continue  # its draws are from two other streams
        spread.given(entry, sharding.splits.get(entry.target, WHOLE) if entry.role == "param" else WHOLE)
        if entry.role == "random":
            spread.random[entry.target] = entry.value.name
    spread.wanted = _wanted(graph, sharding)
    for node in graph.nodes:
        spread.node = node
        if node.is_view:
            view(spread)
        else:
            RULES.get(node.op, Spread.all_whole)(spread)
    return _finished(spread), spread.gathered


def _tokens(graph: Graph, sharding: Sharding) -> tuple[int, int]:
    """(batch, sequence) of the batch: of its first tensor of whole numbers with these dims, or else of its first with two dims or more."""
    shapes = [entry.value.shape for entry in graph.inputs if entry.role == "batch" and len(entry.value.shape) >= 2]
    tokens = [entry.value.shape for entry in graph.inputs if entry.role == "batch" and entry.value.dtype == "i64" and len(entry.value.shape) == 2]
    shape = next(iter([*tokens, *shapes]), None)
    if shape is None:
        raise BatchError("sequence_parallel=True: no tensor of the batch has a sequence (dim 1 of two or more); leave it False for this model")
    if rest := shape[1] % sharding.degree:
        raise BatchError(
            f"sequence_parallel=True: a sequence of {shape[1]} tokens (dim 1 of a batch {list(shape)}) cannot be cut evenly over "
            f"tp={sharding.degree} ranks; make it {shape[1] - rest or sharding.degree} or {shape[1] + sharding.degree - rest} tokens long, "
            "or leave sequence_parallel False"
        )
    return shape[0], shape[1]


def _wanted(graph: Graph, sharding: Sharding) -> dict[str, Split]:
    """Gradient, or what goes into it unchanged in shape -> how its parameter is split."""
    found = {out.name: sharding.splits[out.target] for out in graph.outputs if out.role == "grad" and out.target in sharding.splits}
    for node in reversed(graph.nodes):
        result = node.outputs[0] if node.outputs else None
        split = found.get(result.name) if result is not None else None
        if split is None or node.op not in _SAME:
            continue
        if node.op == "aten.t.default":
            split = Split(1 - split.dim, split.blocks, split.padding)
        for arg in node.args[:2] if node.op == "aten.add.Tensor" else node.args[:1]:
            if isinstance(arg, Ref):
                found.setdefault(arg.name, split)
    return found


def _finished(spread: Spread) -> Graph:
    """Outputs where they are wanted: a gradient as its parameter is, everything else whole. Small gradients are added up over ranks together."""
    outputs: list[Output] = []
    together: list[str] = []
    for out in spread.graph.outputs:
        place: Place = spread.sharding.splits.get(out.target, WHOLE) if out.role == "grad" else WHOLE
        small = (
            out.role == "grad" and isinstance(spread.place[out.name], Sum) and place == WHOLE and spread.full[out.name].extent_bytes <= SMALL_BYTES
        )
        if small and out.name not in together:
            together.append(out.name)
    spread.node = Node("", (), (), (), "backward", "gradients")
    spread.add_up_together(together)
    for out in spread.graph.outputs:
        if out.role == "random":
            continue
        place = spread.sharding.splits.get(out.target, WHOLE) if out.role == "grad" else WHOLE
        spread.node = Node("", (), (), (), "backward" if out.role == "grad" else "forward", spread.maker(out.name).module)
        outputs.append(Output(spread.at(out.name, place).name, out.role, out.target))
    outputs += [Output(state, "random", chain) for chain, state in spread.random.items()]
    return Graph(spread.graph.name, tuple(spread.inputs), tuple(spread.nodes), tuple(outputs))
