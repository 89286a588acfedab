"""Which parameters ZeRO gathers at once. A unit is the parameters that the same blocks use, so a tied weight is a unit of its own. No torch."""

from packhorse.graph.ir import Graph


def units_of(graph: Graph, parameters: list[str]) -> dict[str, str]:
    """Parameter name -> its unit, named by the blocks that use it: "blocks.3", or "embed+lm_head" for a weight that is tied.

    A block is a module with a number in its path (`layers.3`, and all inside it), and elsewhere each module by itself. Parameters that nothing
    uses go by the module that holds them.
    """
    named = {given.value.name: given.target for given in graph.inputs if given.role == "param"}
    used: dict[str, dict[str, None]] = {name: {} for name in parameters}
    for node in graph.nodes:
        if node.is_view or node.phase != "forward":
            continue
        for read in node.arg_names():
            target = named.get(graph.values[read].root)
            if target is not None:
                used[target][_block(node.module)] = None
    units = {}
    for name in parameters:
        holder = name.rpartition(".")[0]
        blocks = used[name] or {_block(holder): None}
        units[name] = "+".join(sorted(blocks))
    return units


def _block(module: str) -> str:
    """The module's path up to its first number; the whole path if there is none."""
    parts = module.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: number + 1])
