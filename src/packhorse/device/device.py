"""What an operator takes on a machine, from a TOML file. No torch. `packhorse calibrate` (bench/calibrate.py) writes such a file.

name = "cpu"
description = "where the figures come from"
other = { fixed_s = 4e-06, s_per_byte = 3e-10 }                    # operators without a row; what is left out is 0
[rows]
"aten.mm.default" = { fixed_s = 6e-06, s_per_flop = 2e-11 }
"""

import json
import tomllib
from dataclasses import dataclass, fields
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

from packhorse.errors import UserError
from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Arg, Node, Ref, Value
from packhorse.graph.operators import is_collective, operator
from packhorse.planning.flops import node_flops

# Positions of arguments of which a kernel reads as many elements as it is asked for, not all: as much as it writes.
_GATHERED = {
    "aten.embedding.default": 0,
    "packhorse.part_embedding.default": 0,
    "aten.index_select.default": 0,
    "aten.gather.default": 0,
    "aten.index.Tensor": 0,
    "aten.nll_loss_forward.default": 0,
}
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
    """rows: operator, or a kind of it (`row_of`), -> Cost. other: operators without a row. description: where the figures come from."""

    name: str
    description: str
    rows: dict[str, Cost]
    other: Cost

    def seconds(self, node: Node, values: dict[str, Value]) -> float:
        """What one call of the node takes; 0 for a view, for memory that is only asked for, and for what runs beside the computation: collectives, of
        whose links a device file says nothing. values: those of its graph."""
        if node.is_view or node.op in _FREE or is_collective(node.op):
            return 0.0
        cost = self.rows.get(row_of(node)) or self.rows.get(node.op, self.other)
        seconds = cost.fixed_s
        if cost.s_per_byte:
            seconds += cost.s_per_byte * node_bytes(node, values)
        if cost.s_per_flop:
            seconds += cost.s_per_flop * node_flops(node, values)
        return seconds


def row_of(node: Node) -> str:
    """The row that fits a node best: its operator, with " transposed" for such a convolution and " 16-bit" where the result is bf16 or f16.

    Where a device has no row for the kind, that of the operator holds.
    """
    name, transposed = node.op, _TRANSPOSED.get(node.op)
    if transposed is not None and node.args[transposed]:
        name += " transposed"
    first = node.outputs[0] if node.outputs else None
    return name + " 16-bit" if first is not None and first.dtype in ("bf16", "f16") else name


def node_bytes(node: Node, values: dict[str, Value]) -> int:
    """Bytes that a node reads and writes: of its arguments and results, without arguments of which only the shape is read.

    A tensor of which elements are picked (the weight of an embedding) counts as many bytes as the result, at most its own.
    """
    total = written = sum(_bytes(value) for value in node.outputs if value is not None)
    unread, gathered = operator(node.op).unread, _GATHERED.get(node.op)
    for position, arg in enumerate(node.args):
        if isinstance(arg, (Ref, tuple)) and position not in unread:
            read = _read(arg, values)
            total += min(read, written) if position == gathered else read
    return total


def _bytes(value: Value) -> int:
    """Bytes that are touched: an expanded tensor has fewer than elements, a strided one fewer than its extent."""
    shape = value.shape
    if 0 in value.strides:
        shape = tuple(dim for dim, stride in zip(shape, value.strides) if stride or dim == 0)
    return prod(shape) * ITEMSIZE[value.dtype]


def _read(arg: Arg, values: dict[str, Value]) -> int:
    if isinstance(arg, Ref):
        return _bytes(values[arg.name])
    return sum(_read(item, values) for item in arg) if isinstance(arg, tuple) else 0


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
    kinds = {
        "name": (str, "a string"),
        "description": (str, "a string"),
        "other": (dict, "the cost of operators without a row"),
        "rows": (dict, "a table"),
    }
    for key in given.keys() - kinds.keys():
        raise UserError(f"the device file {source} has an unknown key {key!r}; it has {', '.join(kinds)}, and operators stand below [rows]")
    for key, (kind, words) in kinds.items():
        if not isinstance(given.get(key), kind):
            seen = f"is {given[key]!r}" if key in given else "is missing"
            raise UserError(f"the device file {source}: {key} {seen}, expected {words}")
    rows = {op: _cost(f"rows.{op!r}", cost, source) for op, cost in given["rows"].items()}
    return Device(given["name"], given["description"], rows, _cost("other", given["other"], source))


def _cost(where: str, given: Any, source: str) -> Cost:
    known = [field.name for field in fields(Cost)]
    if not isinstance(given, dict):
        raise UserError(f"the device file {source}: {where} is {given!r}, expected numbers such as {{ fixed_s = 5e-06, s_per_byte = 2e-10 }}")
    for key, number in given.items():
        if key not in known:
            raise UserError(f"the device file {source}: unknown key {key!r} in {where}; a cost has {', '.join(known)}")
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= 1e9:
            raise UserError(f"the device file {source}: {key} of {where} is {number!r}, expected a finite number of seconds, 0 or more")
    return Cost(**{key: float(number) for key, number in given.items()})


def format_device(device: Device) -> str:
    """The device as TOML that parse_device reads back to an equal one."""
    lines = [f"name = {_quoted(device.name)}", f"description = {_quoted(device.description)}", f"other = {_numbers(device.other)}", "", "[rows]"]
    lines += [f"{_quoted(op)} = {_numbers(cost)}" for op, cost in sorted(device.rows.items())]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # JSON escapes are TOML escapes; DEL alone is legal in JSON and not in TOML.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _numbers(cost: Cost) -> str:
    parts = [(field.name, getattr(cost, field.name)) for field in fields(Cost)]
    return "{ " + ", ".join(f"{name} = {part!r}" for name, part in parts if part) + " }"
