"""Graphs for the tests of recomputation: a uniform chain, and the facts of a graph whose nodes take a second each."""

from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value
from packhorse.recompute.facts import Facts, facts_of

PLACES = {("metric", "loss"): ("metrics", 0, (1,)), ("grad", "w"): ("gradients", 0, (1,))}
OP = "aten.cat.default"  # writes into planned memory, takes over nobody's bytes


def node(name: str, read: list[str], phase: str = "forward", elements: int = 16) -> Node:
    return Node(OP, (tuple(Ref(r) for r in read),), (), (Value(name, "f32", (elements,), (1,)),), phase)


def uniform_chain(n: int) -> Graph:
    """v0 .. v(n-1), each made of the one before; the gradient g(k) reads g(k+1) and v(k-1). Values of 64 bytes."""
    forward = [node(f"v{k}", [f"v{k - 1}" if k else "x"]) for k in range(n)]
    backward = [node(f"g{k}", [f"g{k + 1}" if k < n - 1 else f"v{k}", *([f"v{k - 1}"] if k else [])], "backward") for k in range(n - 1, -1, -1)]
    outputs = (Output(f"v{n - 1}", "metric", "loss"), Output("g0", "grad", "w"))
    return Graph("first", (Input(Value("x", "f32", (16,), (1,)), "batch", "x"),), (*forward, *backward), outputs)


def facts(graph: Graph, seconds: list[float] | None = None) -> Facts:
    return facts_of(graph, PLACES, seconds or [1.0] * len(graph.nodes))
