"""Random training graphs: a forward DAG and the gradients of its nodes, as a `Graph` of operators that take over nobody's bytes.

Sizes and seconds are drawn; what a gradient reads is drawn too (an input, the output, or neither of the forward node's), as operators differ in it.
"""

import random

from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value

OP = "aten.cat.default"  # writes into planned memory, never over an argument


def random_graph(num_nodes: int, seed: int) -> tuple[Graph, list[float]]:
    """A graph of about `num_nodes` nodes, and the seconds of each."""
    draw = random.Random(seed)
    n = num_nodes // 2
    nodes: list[Node] = []
    seconds: list[float] = []

    def make(name: str, read: list[str], phase: str, elements: int) -> None:
        args = tuple(Ref(name) for name in dict.fromkeys(read))
        nodes.append(Node(OP, (args,), (), (Value(name, "f32", (elements,), (1,)),), phase))
        seconds.append(draw.choice((1.0, 1.0, 2.0, 5.0, 20.0)) * draw.uniform(0.8, 1.2) * 1e-6)

    size = [16 * draw.randint(1, 12) for _ in range(n)]
    inputs = [[f"v{i}" for i in sorted({k - 1, *(draw.randrange(k) for _ in range(draw.choice((0, 0, 1))))})] if k else ["x"] for k in range(n)]
    for k in range(n):
        make(f"v{k}", inputs[k], "forward", size[k])
    consumers: dict[int, list[int]] = {}
    for k in range(n):
        for name in inputs[k]:
            if name != "x":
                consumers.setdefault(int(name[1:]), []).append(k)
    for k in range(n - 1, -1, -1):
        read = [f"g{c}" for c in consumers.get(k, [])]
        read += [f"v{k}"] if draw.random() < 0.4 or not read else []
        read += [name for name in inputs[k] if name != "x" and draw.random() < 0.7]
        make(f"g{k}", read, "backward", size[k])
    given = (Input(Value("x", "f32", (16,), (1,)), "batch", "x"),)
    outputs = (Output(f"v{n - 1}", "metric", "loss"), Output("g0", "grad", "w"))
    return Graph("first", given, tuple(nodes), outputs), seconds
