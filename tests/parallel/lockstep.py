"""The graphs of all tp ranks, run side by side in one process: what each has of a value, and the collectives between them.

Nothing of the runtime takes part: each node runs as the oracle runs it, on tensors that lie as the graph says, and a collective is plain sums and
concatenations of what the ranks have.
"""

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Generator, Tensor

from packhorse.capture.capture import Captured, capture
from packhorse.capture.dtypes import LONG
from packhorse.graph.ir import Graph, Node, Value
from packhorse.graph.operators import is_tensor_collective
from packhorse.graph.own_outputs import own_outputs
from packhorse.graph.verify import verify
from packhorse.parallel.split import Sharding, Split
from packhorse.parallel.tensor.split_graph import split_graph
from packhorse.parallel.tensor.spread import Gathered
from packhorse.runtime.random import drawing_as
from packhorse.runtime.reference import _call, _get, run_graph


@dataclass(frozen=True)
class Compared:
    """apart: output -> largest difference from one rank, over the largest element there. graphs: of the ranks. gathered: as split_graph says."""

    apart: dict[tuple[str, str], float]
    graphs: list[Graph]
    gathered: list[Gathered]

    def collectives(self, phase: str) -> Counter:
        """(kind, elements of its result) -> how many there are."""
        nodes = [node for node in self.graphs[0].nodes if node.phase == phase and is_tensor_collective(node.op)]
        return Counter((node.op.split("_")[1].split(".")[0], node.outputs[0].num_elements) for node in nodes)


def compare(model: torch.nn.Module, batch: dict[str, Tensor], loss, splits: dict[str, Split], degree: int, sequence: bool = False) -> Compared:
    """One step's forward and backward pass on `degree` ranks beside one rank."""
    captured = captured_once(model, tuple(batch), loss, batch)
    shardings = [Sharding(degree, rank, splits, sequence) for rank in range(degree)]
    graphs, gathered = [], []
    for sharding in shardings:
        graph, gathered = split_graph(captured.micro, sharding)
        verify(graph)
        graphs.append(own_outputs(graph))
        verify(graphs[-1])
    want = run_graph(captured.micro, _inputs(captured.micro, model, batch, captured, None))
    got = run_side_by_side(graphs, [_inputs(graph, model, batch, captured, sharding) for graph, sharding in zip(graphs, shardings)])
    apart = {}
    for key, one in want.items():
        split = splits.get(key[1]) if key[0] == "grad" else None
        ours = [ranks[key] for ranks in got]
        assert split is not None or all(torch.equal(ours[0], other) for other in ours), key
        difference = ((ours[0] if split is None else joined(ours, split)) - one).abs().max().item()
        apart[key] = difference / max(one.abs().max().item(), 1e-12)
    return Compared(apart, graphs, gathered)


@cache
def _captured(model, names, loss, batch_id) -> list[Captured]:
    return []


def captured_once(model, names, loss, batch) -> Captured:
    kept = _captured(model, names, loss, id(batch))
    if not kept:
        kept.append(capture(model, batch, loss))
    return kept[0]


def part(tensor: Tensor, split: Split | None, rank: int, degree: int) -> Tensor:
    """What a rank has of a tensor."""
    if split is None:
        return tensor
    zeros = tensor.new_zeros([split.padding if dim == split.dim else size for dim, size in enumerate(tensor.shape)])
    padded, at, found = torch.cat([tensor, zeros], split.dim), 0, []
    for block in split.blocks:
        found.append(padded.narrow(split.dim, at, block).chunk(degree, split.dim)[rank])
        at += block
    return torch.cat(found, split.dim)


def joined(parts: list[Tensor], split: Split) -> Tensor:
    """The tensor that ranks have these parts of."""
    degree, at, found = len(parts), 0, []
    for block in split.blocks:
        found += [own.narrow(split.dim, at, block // degree) for own in parts]
        at += block // degree
    return torch.cat(found, split.dim).narrow(split.dim, 0, sum(split.blocks) - split.padding)


def run_side_by_side(
    graphs: list[Graph], inputs: list[dict[str, Tensor]], generators: list[dict[str, Generator]] | None = None, alike: set[str] | None = None
) -> list[dict]:
    """(role, target) -> tensor of each rank's outputs. What is marked as replicated has to have the same bits on all of them.

    generators: what each rank draws from, by name. alike: gets the names of the results that turned out the same on all ranks.
    """
    tables = [dict(given) for given in inputs]
    assert len({tuple(node.op for node in graph.nodes) for graph in graphs}) == 1, "all ranks run the same operators in the same order"
    assert len({tuple(dict(node.kwargs).get("tag") for node in graph.nodes) for graph in graphs}) == 1
    with torch.no_grad():
        for nodes in zip(*(graph.nodes for graph in graphs)):
            args = [[_get(arg, table) for arg in node.args] for table, node in zip(tables, nodes)]
            if nodes[0].is_view:
                for table, node in zip(tables, nodes):
                    for value in node.outputs:
                        table[value.name] = _view(table[value.base], value)
            elif is_tensor_collective(nodes[0].op):
                flat = [memory(own[0]) for own in args]
                for rank, (table, node) in enumerate(zip(tables, nodes)):
                    (value,) = node.outputs
                    found = torch.cat(flat) if "gather" in node.op else torch.stack(flat).sum(0)
                    found = found.chunk(len(flat))[rank] if "scatter" in node.op else found
                    table[value.name] = found.clone().as_strided(value.shape, value.strides)
            else:
                for rank, (table, node, own, graph) in enumerate(zip(tables, nodes, args, graphs)):
                    kwargs = {key: _get(arg, table) for key, arg in node.kwargs}
                    with nullcontext() if node.rng_in is None or generators is None else drawing_as(generators[rank][node.generator]):
                        results = _call(node, own, kwargs, None, graph.values)
                    for value, result in zip(node.outputs, results):
                        if value is not None:
                            assert tuple(result.shape) == value.shape, f"{node.op}: {tuple(result.shape)}, planned as {value.shape}"
                            table[value.name] = _laid(result, value)
            _check_replicated(nodes, tables, alike)
    return [{(o.role, o.target): t[o.name] for o in g.outputs if o.role != "random"} for g, t in zip(graphs, tables)]


def _check_replicated(nodes: tuple[Node, ...], tables: list[dict[str, Tensor]], alike: set[str] | None) -> None:
    """Every rank has all of what is marked, in the same bits. Memory that is only asked for holds anything."""
    assert len({node.replicated for node in nodes}) == 1, "all ranks mark the same nodes"
    if nodes[0].is_view or "empty" in nodes[0].op:
        return
    for values in zip(*(node.outputs for node in nodes)):
        if values[0] is not None:
            ours = [memory(table[value.name]) for table, value in zip(tables, values)]
            same = all(torch.equal(bits(ours[0]), bits(other)) for other in ours)
            assert same or not nodes[0].replicated, f"%{values[0].name} = {nodes[0].op} in {nodes[0].module or 'the outermost module'} differs"
            if same and alike is not None:
                alike.add(values[0].name)


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor."""
    return tensor.reshape(-1).view(torch.uint8)


def memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order of memory."""
    assert tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return tensor.as_strided((tensor.numel(),), (1,))


def _view(root: Tensor, value: Value) -> Tensor:
    return root.as_strided(value.shape, value.strides, root.storage_offset() + value.offset // root.element_size())


def _laid(tensor: Tensor, value: Value) -> Tensor:
    return torch.empty_strided(value.shape, value.strides, dtype=LONG[value.dtype]).copy_(tensor)


def _inputs(graph: Graph, model, batch, captured: Captured, sharding: Sharding | None) -> dict[str, Tensor]:
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    table = {}
    for given in graph.inputs:
        if given.role == "param":
            own = parameters[given.target].detach()
            own = own if sharding is None else part(own, sharding.splits.get(given.target), sharding.rank, sharding.degree)
        elif given.role == "random":
            continue
        else:
            tables = {"buffer": buffers, "batch": batch, "constant": {"seed": torch.ones((), dtype=LONG[given.value.dtype])} | captured.constants}
            own = tables[given.role][given.target]
        table[given.value.name] = _laid(own, given.value)
    return table
