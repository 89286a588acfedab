"""What each operator keeps from forward to backward, counted on a graph: the table operator -> saved bytes.

A storage is saved for an operator if the operator's forward node makes or reads it and a backward node reads its contents. Which backward
formulas read what is PyTorch's; that a tensor held for its shape alone is not kept is ours (operators.py, `unread`).
"""

from packhorse.graph.ir import Graph
from packhorse.graph.liveness import reads


def saved_storages(graph: Graph) -> dict[str, int]:
    """Root name -> bytes of every storage made by a forward node, or given as input, whose contents a backward node reads.

    Parameters, buffers, constants and metrics are not counted: they persist anyway.
    """
    forward = {v.name for node in graph.nodes if node.phase == "forward" for v in node.outputs if v is not None and v.base is None}
    forward |= {i.value.name for i in graph.inputs if i.role == "batch"}
    read = [graph.values[name].root for node in graph.nodes if node.phase in ("recompute", "backward") and not node.is_view for name in reads(node)]
    return {root: graph.values[root].extent_bytes for root in dict.fromkeys(read) if root in forward}


def saved_by_operator(graph: Graph) -> dict[str, int]:
    """Operator -> bytes of the saved storages that its nodes make."""
    table: dict[str, int] = {}
    saved = saved_storages(graph)
    for node in graph.nodes:
        for value in node.outputs:
            if value is not None and value.name in saved and node.phase == "forward":
                table[node.op] = table.get(node.op, 0) + saved[value.name]
    return table
