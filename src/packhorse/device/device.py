"""What operators, copies and collectives take on a machine, from a TOML file (docs/devices.md has its keys). No torch.

A file is one of two kinds. A calibrated one, as `packhorse calibrate` (bench/calibrate.py) writes it, has a cost for each operator:

name = "cpu"
description = "where the figures come from"
other = { fixed_s = 4e-06, s_per_byte = 3e-10 }                    # operators without a row; what is left out is 0
[rows]
"aten.mm.default" = { fixed_s = 6e-06, s_per_flop = 2e-11 }

A described one has peaks and rates of the machine instead, below [roofline].
"""

import json
import tomllib
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from packhorse.device.links import Level, Link
from packhorse.device.roofline import Products, Roofline
from packhorse.device.table import Table
from packhorse.device.touched import node_bytes
from packhorse.errors import UserError
from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Node, Value
from packhorse.graph.operators import computed_by_device, is_collective, is_copy, is_tensor_collective, operator
from packhorse.planning.flops import node_flops

# Where convolutions say whether they are transposed.
_TRANSPOSED = {"aten.convolution.default": 6, "aten.convolution_backward.default": 7}
# Memory that is only asked for.
_FREE = ("aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default")


@dataclass(frozen=True)
class Cost:
    """seconds of a call = fixed_s + bytes * s_per_byte + flops * s_per_flop; bytes and flops as in `node_bytes` and `node_flops`."""

    fixed_s: float = 0.0
    s_per_byte: float = 0.0
    s_per_flop: float = 0.0

    def of(self, num_bytes: int, flops: int) -> float:
        """Seconds of a call."""
        return self.fixed_s + num_bytes * self.s_per_byte + flops * self.s_per_flop


@dataclass(frozen=True)
class Device:
    """A machine, as one rank sees it. description: where the figures come from.

    rows: operator, or a kind of it (`row_of`), -> Cost; other: operators without a row. roofline: instead of rows, for a machine that was not
    calibrated. memory_bytes: of the rank's device, of which a step may take the share `usable` (the rest is the driver's and the libraries').
    host_link: the way to the host's memory, the same in each direction and both at once; host_memory_bytes: what of that memory is the rank's;
    host_bytes_per_s: what of its bandwidth is, where the host computes updates (None: it is as fast at that as the device).
    levels: what joins neighbouring ranks, the smallest group first. band: (low, high) of a measured step's seconds over the predicted ones.
    """

    name: str
    description: str
    rows: dict[str, Cost] = field(default_factory=dict)
    other: Cost = Cost()
    roofline: Roofline | None = None
    memory_bytes: int | None = None
    usable: float = 1.0
    host_link: Link | None = None
    host_memory_bytes: int | None = None
    host_bytes_per_s: float | None = None
    levels: tuple[Level, ...] = ()
    band: tuple[float, float] = (1.0, 1.0)

    def seconds(self, node: Node, values: dict[str, Value]) -> float:
        """What one call of the node takes the computation; 0 for a view, for memory that is only asked for, and for what runs beside it: collectives
        and copies to and from the host (planning/timeline.py has those). A device without levels knows nothing of links: there the collectives that
        are waited for at once (over tp) cost what any operator does. values: those of its graph."""
        if node.is_view or node.op in _FREE or is_copy(node.op) or is_collective(node.op):
            return 0.0
        if self.levels and is_tensor_collective(node.op):
            return 0.0
        if self.host_bytes_per_s is not None and operator(node.op).on_host:
            return node_bytes(node, values) / self.host_bytes_per_s
        if self.roofline is not None:
            first = next((value for value in node.outputs if value is not None), None)
            dtype = "f32" if first is None else first.dtype
            return self.roofline.seconds(node_bytes(node, values), node_flops(node, values), dtype)
        cost = self.rows.get(row_of(node)) or self.rows.get(computed_by_device(node.op), self.other)
        seconds = cost.fixed_s
        if cost.s_per_byte:
            seconds += cost.s_per_byte * node_bytes(node, values)
        if cost.s_per_flop:
            seconds += cost.s_per_flop * node_flops(node, values)
        return seconds

    def level_of(self, span: int) -> Level | None:
        """The first level that joins `span` neighbouring ranks; None for a device without levels.

        Raises UserError where even the last one joins fewer.
        """
        for level in self.levels:
            if level.ranks >= span:
                return level
        if not self.levels:
            return None
        last = self.levels[-1]
        raise UserError(
            f"the device {self.name!r} joins at most {last.ranks} ranks ({last.name}), and the mesh has collectives over {span} neighbouring ranks; "
            f"plan for a smaller mesh, or give a device file of your own whose last level has more ranks"
        )

    def collective_seconds(self, sent_bytes: int, ranks: int, span: int, rounds: int = 1) -> float:
        """What a collective takes of `ranks` ranks, the outermost of which are `span` neighbouring ranks apart, when each sends so many bytes.

        (ranks - 1) messages a round, and the bytes, over the level that joins them: ring or pairwise algorithms in the alpha-beta model of Thakur,
        Rabenseifner and Gropp 2005, sections 3 and 4. rounds: 1 of a gather or a reduce-scatter, 2 of an all-reduce. 0 without levels.
        """
        level = self.level_of(span)
        return 0.0 if level is None else level.link.seconds(sent_bytes, rounds * (ranks - 1))


def row_of(node: Node) -> str:
    """The row that fits a node best: its operator, with " transposed" for such a convolution and " 16-bit" where the result is bf16 or f16.

    Where a device has no row for the kind, that of the operator holds.
    """
    name, transposed = computed_by_device(node.op), _TRANSPOSED.get(node.op)
    if transposed is not None and node.args[transposed]:
        name += " transposed"
    first = node.outputs[0] if node.outputs else None
    return name + " 16-bit" if first is not None and first.dtype in ("bf16", "f16") else name


def packaged() -> list[str]:
    """Names of the device files that come with packhorse."""
    return sorted(path.name.removesuffix(".toml") for path in files("packhorse.device").iterdir() if path.name.endswith(".toml"))


def load_device(name_or_path: str | Path | None = None) -> Device:
    """The device of a file: None is the packaged "cpu", a word without a dot or slash the packaged file of that name, anything else a path.

    Raises UserError for a file that cannot be read, and for a key or number that is wrong, by name.
    """
    given = "cpu" if name_or_path is None else str(name_or_path)
    if isinstance(name_or_path, Path) or "." in given or "/" in given or "\\" in given:
        where = Path(given)
        try:
            text = where.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot read the device file {given}: {error.strerror}; give the path of a file that `packhorse calibrate` wrote, or one of "
                f"the names {', '.join(packaged())}"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"the device file {given} is not UTF-8 text ({error.reason} at byte {error.start}); give a TOML file") from error
        return parse_device(text, given)
    if given not in packaged():
        raise UserError(
            f"no device {given!r} comes with packhorse; the names are {', '.join(packaged())}; a file of your own is given by its path, "
            f"such as ./{given or 'device'}.toml, and `packhorse calibrate --write` makes one"
        )
    return parse_device(files("packhorse.device").joinpath(f"{given}.toml").read_text(encoding="utf-8"), given)


def parse_device(text: str, source: str) -> Device:
    """The text of a device file -> Device. Raises UserError; source names the file in its message."""
    try:
        given = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(
            f"the device file {source} is not valid TOML: {error}; correct that line, or write the file anew with `packhorse calibrate --write`"
        ) from error
    top = Table(given, "", source)
    top.only(*(key.name for key in fields(Device)), hint=", and operators stand below [rows]")
    name, description = top.text("name"), top.text("description")
    rows, other, roofline = {}, Cost(), None
    if "roofline" in given:
        for key in ("rows", "other"):
            if key in given:
                raise UserError(f"the device file {source} has both roofline and {key}: seconds come from one of them; take the other away")
        roofline = _roofline(top.table("roofline", "a table"))
    else:
        other = _cost("other", top.table("other", "the cost of operators without a row").entries, source)
        rows = {op: _cost(f"rows.{op!r}", cost, source) for op, cost in top.table("rows", "a table").entries.items()}
    return Device(
        name,
        description,
        rows,
        other,
        roofline,
        memory_bytes=top.whole("memory_bytes", 1, "bytes") if "memory_bytes" in given else None,
        usable=top.share("usable") if "usable" in given else 1.0,
        host_link=_link(top.table("host_link", _LINK), "fixed_s", "bytes_per_s") if "host_link" in given else None,
        host_memory_bytes=top.whole("host_memory_bytes", 0, "bytes") if "host_memory_bytes" in given else None,
        host_bytes_per_s=top.rate("host_bytes_per_s", "bytes a second") if "host_bytes_per_s" in given else None,
        levels=_levels(top) if "levels" in given else (),
        band=_band(top) if "band" in given else (1.0, 1.0),
    )


_LINK = "a link such as { fixed_s = 1e-05, bytes_per_s = 1e+10 }"
_PRODUCTS = "the products of a dtype, such as { peak = 1e+13, efficiency = [[1e+09, 0.5]] }"
_EFFICIENCY = "a list of [flops, share of the peak], ascending in flops above 0, shares above 0 and at most 1"


def _cost(where: str, given: Any, source: str) -> Cost:
    known = [key.name for key in fields(Cost)]
    if not isinstance(given, dict):
        raise UserError(f"the device file {source}: {where} is {given!r}, expected numbers such as {{ fixed_s = 5e-06, s_per_byte = 2e-10 }}")
    table = Table(given, where, source)
    table.only(*known)
    return Cost(**{key: table.seconds(key) for key in given})


def _link(table: Table, *keys: str) -> Link:
    table.only(*keys)
    return Link(table.seconds("fixed_s"), table.rate("bytes_per_s", "bytes"))


def _levels(top: Table) -> tuple[Level, ...]:
    """[[levels]], each with more ranks than the one before."""
    given = top.entries["levels"]
    if not isinstance(given, list) or not given or not all(isinstance(entry, dict) for entry in given):
        raise top.wrong("levels", "one table [[levels]] or more, the smallest group of ranks first")
    found: list[Level] = []
    for number, entry in enumerate(given):
        table = Table(entry, f"levels[{number}]", top.source)
        link = _link(table, "name", "ranks", "fixed_s", "bytes_per_s")
        found.append(Level(table.text("name"), table.whole("ranks", found[-1].ranks + 1 if found else 2, "ranks"), link))
    return tuple(found)


def _band(top: Table) -> tuple[float, float]:
    expected = "two numbers above 0, the lower one first"
    low, high = top.pair("band", expected)
    if not 0 < low <= high:
        raise top.wrong("band", expected)
    return low, high


def _roofline(table: Table) -> Roofline:
    table.only(*(key.name for key in fields(Roofline)))
    given = table.table("products", "a table of dtypes, f32 among them")
    for dtype in given.entries:
        if dtype not in ITEMSIZE:
            raise UserError(f"the device file {table.source}: {dtype!r} in {given.where} is no dtype; expected f32, f16, bf16 or f64")
    products = {dtype: _products(given.table(dtype, _PRODUCTS)) for dtype in dict.fromkeys(("f32", *given.entries))}
    return Roofline(products, table.rate("bytes_per_s", "bytes"), table.seconds("launch_s"))


def _products(table: Table) -> Products:
    table.only(*(key.name for key in fields(Products)))
    efficiency = table.pairs("efficiency", _EFFICIENCY)
    sizes = [size for size, _ in efficiency]
    if not sizes or sizes[0] <= 0 or sizes != sorted(set(sizes)) or not all(0 < share <= 1 for _, share in efficiency):
        raise table.wrong("efficiency", _EFFICIENCY)
    return Products(table.rate("peak", "flops"), efficiency)


def format_device(device: Device) -> str:
    """The device as TOML that parse_device reads back to an equal one."""
    lines = [f"name = {_quoted(device.name)}", f"description = {_quoted(device.description)}"]
    for key in ("memory_bytes", "host_memory_bytes", "host_bytes_per_s"):
        if getattr(device, key) is not None:
            lines.append(f"{key} = {getattr(device, key)!r}")
    if device.usable != 1.0:
        lines.append(f"usable = {device.usable!r}")
    if device.band != (1.0, 1.0):
        lines.append(f"band = {list(device.band)!r}")
    if device.host_link is not None:
        lines.append(f"host_link = {{ fixed_s = {device.host_link.fixed_s!r}, bytes_per_s = {device.host_link.bytes_per_s!r} }}")
    if device.roofline is None:
        lines.append(f"other = {_numbers(device.other)}")
    for level in device.levels:
        lines += ["", "[[levels]]", f"name = {_quoted(level.name)}", f"ranks = {level.ranks}"]
        lines += [f"fixed_s = {level.link.fixed_s!r}", f"bytes_per_s = {level.link.bytes_per_s!r}"]
    if device.roofline is None:
        lines += ["", "[rows]", *(f"{_quoted(op)} = {_numbers(cost)}" for op, cost in sorted(device.rows.items()))]
    else:
        lines += ["", "[roofline]", f"bytes_per_s = {device.roofline.bytes_per_s!r}", f"launch_s = {device.roofline.launch_s!r}"]
        lines += ["", "[roofline.products]"]
        for dtype, products in device.roofline.products.items():
            efficiency = [list(entry) for entry in products.efficiency]
            lines.append(f"{dtype} = {{ peak = {products.peak!r}, efficiency = {efficiency!r} }}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # JSON escapes are TOML escapes; DEL alone is legal in JSON and not in TOML.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _numbers(cost: Cost) -> str:
    parts = [(key.name, getattr(cost, key.name)) for key in fields(Cost)]
    return "{ " + ", ".join(f"{name} = {part!r}" for name, part in parts if part) + " }"
