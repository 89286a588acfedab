"""The checker of Graph: slow and obvious. Run after every pass in the tests."""

from packhorse.errors import CheckError
from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import MARKS, ROLES_IN, ROLES_OUT, Graph, Node, Value


def verify(graph: Graph) -> None:
    """Raises CheckError, naming node and value, unless `graph` keeps every rule of graph/ir.py.

    Names are defined once and before use; views lie inside their root and never view a view; random states form one chain for each
    generator; outputs exist; no two outputs write the same target.
    """
    defined: dict[str, Value] = {}
    random_states: dict[str, str] = {}  # generator -> its newest state
    for given in graph.inputs:
        try:
            if given.role not in ROLES_IN:
                raise CheckError(f"unknown role {given.role!r}")
            _define(given.value, defined)
            if given.role == "random":
                if given.target in random_states:
                    raise CheckError(f"a second random state of {given.target!r}; its draws form one chain")
                random_states[given.target] = given.value.name
        except CheckError as error:
            raise CheckError(f"graph {graph.name}, input %{given.value.name}: {error}") from None
    for index, node in enumerate(graph.nodes):
        try:
            _verify_node(node, defined, random_states)
        except CheckError as error:
            raise CheckError(f"graph {graph.name}, node {index} ({node.op}): {error}") from None
    _verify_outputs(graph, defined, random_states)


def _verify_node(node: Node, defined: dict[str, Value], random_states: dict[str, str]) -> None:
    read = list(node.arg_names())
    for name in read:
        if name not in defined:
            raise CheckError(f"reads %{name}, which is not defined above it")
    if node.mark not in MARKS or (node.mark_name and node.mark != "keep"):
        raise CheckError(f"unknown mark {node.mark!r} with the name {node.mark_name!r}")
    if (node.rng_in is None) != (node.rng_out is None):
        raise CheckError("a random node consumes one state and defines the next")
    if node.rng_in is not None:
        newest = random_states.get(node.generator)
        if node.rng_in != newest:
            raise CheckError(f"draws from %{node.rng_in}, but the state at this point is %{newest} of {node.generator!r}")
        random_states[node.generator] = str(node.rng_out)
        _define(Value(str(node.rng_out), "rng", (), ()), defined)
    for value in node.outputs:
        if value is not None:
            _define(value, defined)
            if value.base is not None and value.base not in [defined[name].root for name in read]:
                raise CheckError(f"%{value.name} views %{value.base}, which is not among the node's arguments")


def _define(value: Value, defined: dict[str, Value]) -> None:
    if value.name in defined:
        raise CheckError(f"%{value.name} is defined twice")
    if value.dtype not in ITEMSIZE:
        raise CheckError(f"%{value.name} has unknown dtype {value.dtype!r}")
    if len(value.shape) != len(value.strides):
        raise CheckError(f"%{value.name} has {len(value.shape)} dims but {len(value.strides)} strides")
    if value.base is not None:
        root = defined.get(value.base)
        if root is None:
            raise CheckError(f"%{value.name} views %{value.base}, which is not defined above it")
        if root.base is not None:
            raise CheckError(f"%{value.name} views %{value.base}, itself a view; `base` names the root")
        extent = value.extent_bytes
        if value.offset < 0 or (extent and value.offset + extent > root.extent_bytes):
            raise CheckError(f"%{value.name} covers bytes [{value.offset}, {value.offset + extent}) of %{value.base}, which has {root.extent_bytes}")
    elif value.offset != 0:
        raise CheckError(f"%{value.name} owns its storage but starts at byte {value.offset}")
    defined[value.name] = value


def _verify_outputs(graph: Graph, defined: dict[str, Value], random_states: dict[str, str]) -> None:
    targets = set()
    for out in graph.outputs:
        where = f"graph {graph.name}, output %{out.name}"
        if out.role not in ROLES_OUT:
            raise CheckError(f"{where}: unknown role {out.role!r}")
        if out.name not in defined:
            raise CheckError(f"{where}: is not defined")
        if (out.role, out.target) in targets:
            raise CheckError(f"{where}: {out.role} {out.target!r} is written twice")
        targets.add((out.role, out.target))
        if out.role == "random" and out.name != random_states.get(out.target):
            raise CheckError(f"{where}: the last random state of {out.target!r} is %{random_states.get(out.target)}")
