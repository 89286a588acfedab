import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.device.device import Cost, Device, format_device, load_device, node_bytes, parse_device, row_of
from packhorse.errors import UserError
from packhorse.graph.ir import Node, Ref, Value, contiguous_strides

pytestmark = pytest.mark.pure


def value(name, *shape, dtype="f32", strides=None, base=None):
    return Value(name, dtype, shape, contiguous_strides(shape) if strides is None else strides, base)


def node(op, args, *outputs):
    return Node(op, args, (), outputs)


def table(*values):
    return {v.name: v for v in values}


MM = table(value("a", 3, 5), value("b", 5, 7))
DEVICE = Device("d", "", {"aten.mm.default": Cost(1.0, 0.5, 0.25), "aten.relu.default 16-bit": Cost(2.0)}, Cost(0.125, 0.0625))


def test_seconds_of_a_matrix_product():
    """Bytes 4 * (15 + 35 + 21), flops 2 * 3 * 5 * 7."""
    product = node("aten.mm.default", (Ref("a"), Ref("b")), value("c", 3, 7))
    assert DEVICE.seconds(product, MM) == 1.0 + 0.5 * 284 + 0.25 * 210


def test_an_operator_without_a_row_and_what_costs_nothing():
    assert DEVICE.seconds(node("aten.tanh.default", (Ref("a"),), value("c", 3, 5)), MM) == 0.125 + 0.0625 * 120
    assert DEVICE.seconds(node("aten.t.default", (Ref("a"),), value("c", 5, 3, strides=(1, 5), base="a")), MM) == 0.0
    assert DEVICE.seconds(node("aten.empty_like.default", (Ref("a"),), value("c", 3, 5)), MM) == 0.0


def test_sixteen_bits_and_transposed_convolutions_have_rows_of_their_own():
    narrow = node("aten.relu.default", (Ref("a"),), value("c", 3, 5, dtype="bf16"))
    assert DEVICE.seconds(narrow, MM) == 2.0
    assert DEVICE.seconds(node("aten.relu.default", (Ref("a"),), value("c", 3, 5)), MM) == 0.125 + 0.0625 * 120
    # no row for the kind: the operator's own
    assert DEVICE.seconds(node("aten.mm.default", (Ref("a"), Ref("b")), value("c", 3, 7, dtype="f16")), MM) == 1.0 + 0.5 * 242 + 0.25 * 210
    settings = ((2, 2), (0, 0), (1, 1), True, (0, 0), 1)
    forward = node("aten.convolution.default", (Ref("a"), Ref("b"), None, *settings), value("c", 1))
    backward = node("aten.convolution_backward.default", (Ref("a"), Ref("a"), Ref("b"), None, *settings, (True, True, False)), value("c", 1))
    assert row_of(forward) == "aten.convolution.default transposed"
    assert row_of(backward) == "aten.convolution_backward.default transposed"


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


NUMBER = st.floats(0, 1e9)


@given(
    st.builds(
        Device,
        st.text(),
        st.text(),
        st.dictionaries(st.text(), st.builds(Cost, NUMBER, NUMBER, NUMBER)),
        st.builds(Cost, NUMBER, NUMBER, NUMBER),
    )
)
def test_what_is_written_is_read_back(device):
    assert parse_device(format_device(device), "a file") == device


def test_the_packaged_device_knows_what_models_are_made_of():
    cpu = load_device()
    assert cpu == load_device("cpu") and cpu.name == "cpu" and cpu.description and cpu.other.fixed_s > 0
    for op in ("mm", "addmm", "bmm", "convolution", "convolution_backward", "_scaled_dot_product_flash_attention_for_cpu"):
        assert 1e-13 < cpu.rows[f"aten.{op}.default"].s_per_flop < 1e-9, op  # between 1 GFLOP/s and 10 TFLOP/s
    for op in ("gelu", "relu", "native_dropout", "native_layer_norm", "_native_batch_norm_legit_functional", "clone", "_log_softmax"):
        assert 1e-12 < cpu.rows[f"aten.{op}.default"].s_per_byte < 1e-7, op
    # drawing costs more than multiplying with what was drawn
    assert cpu.rows["aten.native_dropout.default"].s_per_byte > cpu.rows["aten.native_dropout_backward.default"].s_per_byte


GOOD = 'name = "n"\ndescription = "d"\nother = { fixed_s = 1e-6 }\n[rows]\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + '"aten.mm.default" = { s_per_flops = 1 }', r"unknown key 's_per_flops' in rows.'aten.mm.default'.*s_per_flop"),
        (GOOD + '"aten.mm.default" = { fixed_s = -1e-6 }', r"fixed_s of rows.'aten.mm.default' is -1e-06, expected a finite number"),
        (GOOD + '"aten.mm.default" = { fixed_s = nan }', "is nan, expected a finite"),
        (GOOD + '"aten.mm.default" = { fixed_s = inf }', "is inf, expected a finite"),
        (GOOD + f'"aten.mm.default" = {{ fixed_s = 1{"0" * 400} }}', "expected a finite"),
        (GOOD + '"aten.mm.default" = { fixed_s = true }', "is True, expected a finite"),
        (GOOD + '"aten.mm.default" = { fixed_s = "1" }', "is '1', expected a finite"),
        (GOOD + '"aten.mm.default" = 3', "rows.'aten.mm.default' is 3, expected numbers such as"),
        (GOOD + "aten.mm.default = { fixed_s = 1 }", "unknown key 'mm' in rows.'aten'"),
        ("speed = 3\n" + GOOD, "unknown key 'speed'"),
        (GOOD.replace('name = "n"', "name = 3"), "name is 3, expected a string"),
        (GOOD.replace("other = { fixed_s = 1e-6 }", ""), "other is missing, expected the cost of operators without a row"),
        (GOOD.replace("[rows]", ""), "rows is missing, expected a table"),
        ("name = ", "is not valid TOML"),
    ],
)
def test_a_wrong_file_is_one_paragraph_with_file_and_key(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_device(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)[:-1].replace(text, "")


def test_a_file_is_given_by_path_and_a_packaged_one_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu").write_text(GOOD)
    (tmp_path / "mine.toml").write_text(GOOD)
    assert load_device("mine.toml") == load_device("./cpu") == load_device(tmp_path / "cpu") == Device("n", "d", {}, Cost(1e-6))
    assert load_device("cpu").rows
    with pytest.raises(UserError, match=r"no device 'gpu' comes with packhorse; the names are cpu.*\./gpu\.toml"):
        load_device("gpu")
    with pytest.raises(UserError, match=r"cannot read the device file other\.toml: No such file.*packhorse calibrate"):
        load_device("other.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"bytes\.toml is not UTF-8"):
        load_device("bytes.toml")
