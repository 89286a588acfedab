import pytest

from packhorse.device.touched import node_bytes
from packhorse.graph.ir import Node, Ref, Value, contiguous_strides

pytestmark = pytest.mark.pure


def value(name, *shape, dtype="f32", strides=None):
    return Value(name, dtype, shape, contiguous_strides(shape) if strides is None else strides)


def node(op, args, *outputs):
    return Node(op, args, (), outputs)


def table(*values):
    return {v.name: v for v in values}


@pytest.mark.parametrize(
    ("made", "values", "expected"),
    [
        # a row of 5 seen 3 times is 5 numbers; every second number of 10 is 5
        (
            node("aten.add.Tensor", (Ref("x"), Ref("y")), value("z", 3, 5)),
            table(value("x", 3, 5, strides=(0, 1)), value("y", 3, 5, strides=(10, 2))),
            140,
        ),
        (node("aten.cat.default", ((Ref("x"), Ref("y")), 0), value("z", 7)), table(value("x", 3), value("y", 4)), 56),
        # a table of which 2 rows of 4 are read; the indices are 8 bytes each
        (
            node("aten.embedding.default", (Ref("w"), Ref("i")), value("z", 2, 4)),
            table(value("w", 1000, 4), value("i", 2, dtype="i64")),
            32 + 32 + 16,
        ),
        # of the second argument only the shape is read
        (
            node("aten.avg_pool2d_backward.default", (Ref("g"), Ref("x"), (2, 2)), value("z", 8, 8)),
            table(value("g", 4, 4), value("x", 8, 8)),
            64 + 256,
        ),
        (node("aten.relu.default", (Ref("x"),), value("z", 0, 3)), table(value("x", 0, 3, strides=(0, 1))), 0),
        (node("aten.native_layer_norm.default", (Ref("x"), (3,), None), value("z", 2, 3), None, value("s", 2)), table(value("x", 2, 3)), 24 + 24 + 8),
    ],
)
def test_bytes_that_a_node_touches(made, values, expected):
    assert node_bytes(made, values) == expected
