"""Graphs of any length from short ones: chains written down by hand, of which every length is known."""

import re

import pytest

from packhorse.errors import CheckError
from packhorse.graph.collector import no_search_for_cycles
from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value, contiguous_strides
from packhorse.graph.stamp import Unlike, learn, same_but_for_names, stamp
from packhorse.graph.text import print_graph
from packhorse.graph.verify import verify

pytestmark = pytest.mark.pure


def value(name, shape=(3,), **kwargs):
    return Value(name, "f32", shape, contiguous_strides(shape), **kwargs)


def chain(*counts, width=lambda n: n, scale=lambda i, n: 0.5, special=None):
    """Runs of layers `h = drop(h * w_i)`, all results summed up; then the gradient of each w_i, last one first, and the sum of all of them."""
    inputs, nodes, outputs = [Input(value("x"), "batch", "x")], [], []
    for run, count in enumerate(counts):
        inputs += [Input(value(f"run.{run}.{i}.w"), "param", f"run.{run}.{i}.w") for i in range(count)]
    inputs.append(Input(Value(".rng0", "rng", (), ()), "random", "default"))
    h, kept, draws = "x", [], 0
    for run, count in enumerate(counts):
        for i in range(count):
            w, place = f"run.{run}.{i}.w", f"run.{run}.{i}"
            nodes.append(Node("mul", (Ref(h), Ref(w)), (), (value(f"m{len(nodes)}"),), "forward", place, "a.py:7"))
            made = nodes[-1].outputs[0].name
            op = "special" if special == (run, i) else "drop"
            pair = (value(f"d{len(nodes)}.0"), value(f"d{len(nodes)}.1"))
            scaled = (("scale", scale(i, count)),)
            nodes.append(Node(op, (Ref(made), i), scaled, pair, "forward", place, "a.py:8", f".rng{draws}", f".rng{draws + 1}"))
            draws += 1
            kept.append((run, i, h, made, pair[0].name, pair[1].name))
            h = pair[0].name
    size = width(sum(counts))
    nodes.append(Node("stack", (tuple(Ref(k[4]) for k in kept),), (), (value("stacked", (size, 3)),), "forward", "", "a.py:9"))
    parts = tuple(value(f"parts.{i}", base="stacked", offset=12 * i) for i in range(sum(counts)))
    nodes.append(Node("unbind", (Ref("stacked"),), (), parts, "forward", "", "a.py:9"))
    grad = h
    for place, (run, i, before, _, _, mask) in reversed([*enumerate(kept)]):
        nodes.append(Node("mul_grad", (Ref(grad), Ref(before), Ref(mask), Ref(f"parts.{place}")), (), (value(f"g{place}"),), "backward", "", ""))
        grad = f"g{place}"
        outputs.append(Output(grad, "grad", f"run.{run}.{i}.w"))
    outputs.sort(key=lambda out: out.target.split(".")[:1] + [int(d) for d in re.findall(r"\d+", out.target)])
    outputs = [Output("stacked", "metric", "loss"), *outputs, Output(f".rng{draws}", "random", "default")]
    return Graph("micro", tuple(inputs), tuple(nodes), tuple(outputs))


def renamed(graph):
    """The graph's text with its values numbered in order."""
    names = {v.name: f"v{k}" for k, v in enumerate(v for node in graph.nodes for v in node.outputs)}
    return re.sub(r"(?<=[%@])[^\s,:()\[\]{}=@+]+", lambda m: names.get(m[0], m[0]), print_graph(graph))


def pattern(shortest, longer, check):
    return learn(shortest, longer, check, [{}] * (2 + len(longer)))


@pytest.mark.parametrize("count", [3, 4, 5, 9, 40])
def test_a_chain_of_any_length(count):
    made = stamp(pattern(chain(3), [chain(4)], chain(5)), [count - 3]).graph
    verify(made)
    assert renamed(made) == renamed(chain(count))
    assert same_but_for_names(made, chain(count), {}, {})
    assert not same_but_for_names(made, chain(count, scale=lambda i, n: 0.5 + (i == 2)), {}, {})
    assert not same_but_for_names(made, chain(count, special=(0, 2)), {}, {})


def test_repetitions_of_two_runs_are_told_apart():
    def without_lists(*counts):
        graph = chain(*counts)
        return Graph("micro", graph.inputs, tuple(n for n in graph.nodes if n.op in ("mul", "drop")), graph.outputs[-1:])

    shortest, longer, check = without_lists(3, 3), [without_lists(4, 3), without_lists(3, 4)], without_lists(5, 5)
    made = stamp(pattern(shortest, longer, check), [4, 9]).graph
    assert renamed(made) == renamed(without_lists(7, 12)) != renamed(without_lists(12, 7))


@pytest.mark.parametrize(
    "family",
    [
        lambda n: chain(n, width=lambda n: n * n),  # a size that grows with the square
        lambda n: chain(n, scale=lambda i, n: 1 / n),  # a float that is not the same
        lambda n: chain(n, scale=lambda i, n: 0.1 * i),
        lambda n: chain(n, special=(0, 4)),  # one layer is of another kind
        lambda n: chain(n if n < 5 else 3),  # the longest one does not grow
    ],
)
def test_what_follows_no_pattern_is_refused(family):
    with pytest.raises(Unlike):
        pattern(family(3), [family(4)], family(5))


def test_constants_must_be_equal():
    def with_constants(n):
        graph = chain(n)
        given = tuple(Input(value(f"c{i}"), "constant", f"c{i}") for i in range(n))
        return Graph("micro", (*graph.inputs, *given), graph.nodes, graph.outputs)

    graphs = [with_constants(n) for n in (3, 4, 5)]
    same = [{f"c{i}": "one" for i in range(5)}] * 3
    made = stamp(learn(graphs[0], graphs[1:2], graphs[2], same), [4])
    assert set(made.models) == {f"c{i}" for i in range(7)} and set(made.models.values()) <= {"c0", "c1", "c2"}
    other = [{f"c{i}": i for i in range(5)}] * 3
    with pytest.raises(Unlike):
        learn(graphs[0], graphs[1:2], graphs[2], other)


def test_a_stamp_that_leads_out_of_the_graph_is_no_graph():
    with pytest.raises((Unlike, CheckError, IndexError)):
        verify(stamp(pattern(chain(3), [chain(4)], chain(5)), [-3]).graph)


def test_the_search_for_cycles_is_put_back():
    import gc

    with pytest.raises(ValueError), no_search_for_cycles():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
