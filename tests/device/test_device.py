import pytest
from hypothesis import given
from hypothesis import strategies as st

from packhorse.device.device import Cost, Device, format_device, load_device, packaged, parse_device, row_of
from packhorse.device.links import Level, Link
from packhorse.device.roofline import Products, Roofline
from packhorse.errors import UserError
from packhorse.graph.ir import Node, Ref, Value, contiguous_strides
from packhorse.graph.operators import ALL_GATHER, FROM_HOST, OWN_SLICE, TENSOR_SUM, TO_HOST, WAIT

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


NUMBER = st.floats(0, 1e9)
RATE = st.floats(1e-3, 1e18)
COSTS = st.builds(Cost, NUMBER, NUMBER, NUMBER)
SHARE = st.floats(1e-3, 1.0)
LINKS = st.builds(Link, NUMBER, RATE)
LEVELS = st.lists(st.builds(Level, st.text(), st.integers(2, 10**6), LINKS), max_size=3, unique_by=lambda level: level.ranks)
PRODUCTS = st.builds(
    Products,
    RATE,
    st.lists(st.tuples(st.floats(1, 1e15), SHARE), min_size=1, max_size=4, unique_by=lambda entry: entry[0]).map(lambda rows: tuple(sorted(rows))),
)
ROOFLINES = st.builds(Roofline, st.fixed_dictionaries({"f32": PRODUCTS}, optional={"f16": PRODUCTS, "bf16": PRODUCTS}), RATE, NUMBER)
BANDS = st.tuples(st.floats(0.01, 1), st.floats(1, 100))
REST = {
    "memory_bytes": st.none() | st.integers(1, 10**15),
    "usable": SHARE,
    "host_link": st.none() | LINKS,
    "host_memory_bytes": st.none() | st.integers(0, 10**15),
    "levels": LEVELS.map(lambda levels: tuple(sorted(levels, key=lambda level: level.ranks))),
    "band": BANDS,
}


@given(
    st.builds(Device, st.text(), st.text(), st.dictionaries(st.text(), COSTS), COSTS, **REST)
    | st.builds(Device, st.text(), st.text(), roofline=ROOFLINES, **REST)
)
def test_what_is_written_is_read_back(device):
    assert parse_device(format_device(device), "a file") == device


def test_a_roofline_takes_the_longer_of_flops_and_bytes():
    """mm (3, 5) @ (5, 7): 284 bytes and 210 flops in f32, 142 bytes in f16."""
    device = Device("d", "", roofline=Roofline({"f32": Products(100.0, ((1.0, 0.5),)), "f16": Products(100.0, ((1.0, 1.0),))}, 100.0, 0.25))
    product = node("aten.mm.default", (Ref("a"), Ref("b")), value("c", 3, 7))
    assert device.seconds(product, MM) == 0.25 + 210 / 50  # bytes: 2.84
    halves = table(value("a", 3, 5, dtype="f16"), value("b", 5, 7, dtype="f16"))
    assert device.seconds(node("aten.mm.default", (Ref("a"), Ref("b")), value("c", 3, 7, dtype="f16")), halves) == 0.25 + 2.1
    # a dtype that is not there counts as f32; an operator without flops takes its bytes, a view and collectives nothing
    assert device.seconds(node("aten.mm.default", (Ref("a"), Ref("b")), value("c", 3, 7, dtype="bf16")), halves) == 0.25 + 4.2
    assert device.seconds(node("aten.tanh.default", (Ref("a"),), value("c", 3, 5)), MM) == 0.25 + 1.2
    assert device.seconds(node("aten.t.default", (Ref("a"),), value("c", 5, 3, strides=(1, 5), base="a")), MM) == 0.0


LINK = Link(1.0, 10.0)


@pytest.mark.parametrize("device", [DEVICE, Device("d", "", {}, Cost(1.0), levels=(Level("all", 8, LINK),))])
def test_what_runs_beside_the_computation_takes_it_nothing(device):
    for op in (ALL_GATHER, WAIT, TO_HOST, FROM_HOST):
        assert device.seconds(node(op, (Ref("a"),), value("c", 15)), MM) == 0.0
    assert device.seconds(node(OWN_SLICE, (Ref("a"),), value("c", 5)), MM) > 0.0
    # without links a collective that is waited for at once is like any operator
    assert (device.seconds(node(TENSOR_SUM, (Ref("a"),), value("c", 3, 5)), MM) > 0) == (not device.levels)


def test_neighbours_are_joined_by_the_first_level_that_is_large_enough():
    device = load_device("v100-dgx2")
    assert [device.level_of(span).name for span in (1, 16, 17, 400)] == ["NVSwitch", "NVSwitch", "InfiniBand EDR", "InfiniBand EDR"]
    assert load_device("cpu").level_of(400) is None
    with pytest.raises(
        UserError, match=r"'v100-dgx2' joins at most 4096 ranks \(InfiniBand EDR\).*over 5000 neighbouring ranks; plan for a smaller"
    ) as error:
        device.level_of(5000)
    assert "\n" not in str(error.value)


def test_collectives_by_alpha_and_beta():
    """A message takes 1 s and 0.1 s a byte inside a group of 4, 3 s and 0.5 s a byte beyond it."""
    device = Device("d", "", levels=(Level("box", 4, LINK), Level("net", 64, Link(3.0, 2.0))))
    assert device.collective_seconds(60, 4, 4) == 3 * 1.0 + 60 / 10
    assert device.collective_seconds(60, 4, 4, rounds=2) == 6 * 1.0 + 60 / 10
    assert device.collective_seconds(60, 4, 13) == 3 * 3.0 + 60 / 2  # four ranks, of which each is in a box of its own
    assert device.collective_seconds(0, 1, 1) == 0.0
    assert Device("d", "").collective_seconds(60, 4, 4) == 0.0
    assert LINK.seconds(50, messages=3) == 3.0 + 5.0


# what the data sheets print: bytes a second each way between the GPUs of a node, and flops a second in f16
SHEETS = {"v100-dgx2": (150e9, 125e12), "a100-80": (300e9, 312e12), "h100-80": (450e9, 989e12), "h200": (450e9, 989e12)}


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_described_devices_stay_below_their_data_sheets(name):
    device = load_device(name)
    assert device.name == name and parse_device(format_device(device), name) == device
    nvlink, flops = SHEETS[name]
    assert device.roofline.products["f16"].peak == flops
    assert nvlink / 2 < device.levels[0].link.bytes_per_s <= nvlink
    assert device.host_link.bytes_per_s < device.levels[0].link.bytes_per_s < device.roofline.bytes_per_s
    for products in device.roofline.products.values():
        seconds = [products.seconds(int(1.2**power)) for power in range(180)]
        assert seconds == sorted(seconds)
    low, high = device.band
    assert low <= 1 <= high and 0.9 <= device.usable < 1


def test_all_packaged_files_are_known_here():
    assert packaged() == sorted(["cpu", *SHEETS])


def test_bytes_of_the_papers_v100():
    """A device of 32 GiB, of which a step may take what ZeRO's tables call 32 GB."""
    device = load_device("v100-dgx2")
    assert device.memory_bytes == 32 * 2**30 and device.memory_bytes * device.usable == pytest.approx(32e9, rel=0.005)
    # 800 Gb/s a node over 16 GPUs
    assert device.levels[1].link.bytes_per_s * 16 * 8 == 800e9


def test_the_packaged_device_knows_what_models_are_made_of():
    cpu = load_device()
    assert cpu == load_device("cpu") and cpu.name == "cpu" and cpu.description and cpu.other.fixed_s > 0
    for op in ("mm", "addmm", "bmm", "convolution", "convolution_backward", "_scaled_dot_product_flash_attention_for_cpu"):
        assert 1e-13 < cpu.rows[f"aten.{op}.default"].s_per_flop < 1e-9, op  # between 1 GFLOP/s and 10 TFLOP/s
    for op in ("gelu", "relu", "native_dropout", "native_layer_norm", "_native_batch_norm_legit_functional", "clone", "_log_softmax"):
        assert 1e-12 < cpu.rows[f"aten.{op}.default"].s_per_byte < 1e-7, op
    # drawing costs more than multiplying with what was drawn
    assert cpu.rows["aten.native_dropout.default"].s_per_byte > cpu.rows["aten.native_dropout_backward.default"].s_per_byte


DESCRIBED = """name = "n"
description = "d"
memory_bytes = 1000
usable = 0.5
host_memory_bytes = 0
band = [0.5, 2]
host_link = { fixed_s = 0, bytes_per_s = 1 }
[[levels]]
name = "box"
ranks = 8
fixed_s = 0
bytes_per_s = 1
[[levels]]
name = "net"
ranks = 16
fixed_s = 0
bytes_per_s = 1
[roofline]
launch_s = 0
bytes_per_s = 1
[roofline.products]
f32 = { peak = 1, efficiency = [[1, 0.5], [2, 1]] }
"""
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
        *(
            (DESCRIBED.replace(*change), message)
            for change, message in [
                (("memory_bytes = 1000", "memory_bytes = 1e3"), r"memory_bytes is 1000\.0, expected a whole number of bytes, 1 or more"),
                (("memory_bytes = 1000", "memory_bytes = 0"), "memory_bytes is 0, expected a whole number"),
                (("usable = 0.5", "usable = 1.5"), r"usable is 1\.5, expected a number above 0, at most 1"),
                (("usable = 0.5", "usable = true"), "usable is True, expected a number"),
                (("host_memory_bytes = 0", "host_memory_bytes = -1"), "host_memory_bytes is -1, expected a whole number of bytes, 0 or more"),
                (("[0.5, 2]", "[2, 0.5]"), r"band is \[2, 0\.5\], expected two numbers above 0, the lower one first"),
                (("[0.5, 2]", "3"), "band is 3, expected two numbers"),
                (("{ fixed_s = 0, bytes_per_s = 1 }", "3"), "host_link is 3, expected a link such as"),
                (("{ fixed_s = 0, bytes_per_s = 1 }", "{ fixed_s = 0 }"), "bytes_per_s of host_link is missing, expected a finite number of bytes"),
                (("{ fixed_s = 0, bytes_per_s = 1 }", "{ fixed_s = 0, bytes_per_s = 0 }"), "bytes_per_s of host_link is 0, expected"),
                (("{ fixed_s = 0, bytes_per_s = 1 }", "{ fixed_s = 0, bytes_per_s = 1, gen = 3 }"), "unknown key 'gen' in host_link"),
                (("ranks = 16", "ranks = 8"), r"ranks of levels\[1\] is 8, expected a whole number of ranks, 9 or more"),
                (("ranks = 8", "ranks = 1"), r"ranks of levels\[0\] is 1, expected a whole number of ranks, 2 or more"),
                (('name = "net"', "name = 3"), r"name of levels\[1\] is 3, expected a string"),
                (("launch_s = 0", ""), "launch_s of roofline is missing, expected a finite number of seconds"),
                (("f32 =", "f16 ="), r"f32 of roofline\.products is missing, expected the products of a dtype"),
                (("f32 =", "tf32 ="), r"'tf32' in roofline\.products is no dtype"),
                (("[[1, 0.5], [2, 1]]", "[[2, 0.5], [1, 1]]"), r"efficiency of roofline\.products\.f32 is .*ascending in flops"),
                (("[[1, 0.5], [2, 1]]", "[[1, 0.5], [2, 1.5]]"), r"efficiency of roofline\.products\.f32 is .*at most 1"),
                (("[[1, 0.5], [2, 1]]", "[]"), r"efficiency of roofline\.products\.f32 is \[\], expected"),
                (("[[1, 0.5], [2, 1]]", "[[1, 0.5, 1]]"), r"efficiency of roofline\.products\.f32 is"),
                (("peak = 1", "peak = 0"), r"peak of roofline\.products\.f32 is 0, expected a finite number of flops a second, above 0"),
                (("[roofline]", "[rows]\n[roofline]"), "has both roofline and rows"),
                (("[roofline]", "[speed]"), "unknown key 'speed'"),
            ]
        ),
        ("levels = []\n" + GOOD, r"levels is \[\], expected one table"),
    ],
)
def test_a_wrong_file_is_one_paragraph_with_file_and_key(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        load_device(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)[:-1].replace(text, "")


def test_a_described_file_without_mistakes():
    device = parse_device(DESCRIBED, "mine")
    assert device.levels == (Level("box", 8, Link(0.0, 1.0)), Level("net", 16, Link(0.0, 1.0))) and device.band == (0.5, 2.0)
    assert device.roofline == Roofline({"f32": Products(1.0, ((1.0, 0.5), (2.0, 1.0)))}, 1.0, 0.0) and device.host_link == Link(0.0, 1.0)


def test_a_file_is_given_by_path_and_a_packaged_one_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu").write_text(GOOD)
    (tmp_path / "mine.toml").write_text(GOOD)
    assert load_device("mine.toml") == load_device("./cpu") == load_device(tmp_path / "cpu") == Device("n", "d", {}, Cost(1e-6))
    assert load_device("cpu").rows
    with pytest.raises(UserError, match=r"no device 'gpu' comes with packhorse; the names are a100-80, cpu.*\./gpu\.toml"):
        load_device("gpu")
    with pytest.raises(UserError, match=r"cannot read the device file other\.toml: No such file.*packhorse calibrate"):
        load_device("other.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"bytes\.toml is not UTF-8"):
        load_device("bytes.toml")
