"""Layout problems as CSV files: a header, then one buffer a line, `id,lower,upper,size` and, when laid out, `,offset`.

The format of the minimalloc benchmark instances. The columns may come in any order and others are ignored.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

from packhorse.errors import UserError
from packhorse.memory.buffers import Buffer, Layout

COLUMNS = ("id", "lower", "upper", "size")


def read_csv(path: Path) -> list[Buffer]:
    """The buffers of a file, in its order; offsets, if any, are not read.

    Raises UserError, with file and line, for a file that cannot be read, a missing column, a field that is no whole number, an
    empty lifespan, a negative size, or a name that came before.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return _read(path, csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read the buffers in {path}: {error}") from error


def write_csv(path: Path, buffers: Sequence[Buffer], layout: Layout | None = None) -> None:
    """Writes what read_csv reads; with `layout` each line ends with the buffer's offset.

    Raises UserError if the layout has no offset for a buffer or the file cannot be written.
    """
    missing = [] if layout is None else [b.name for b in buffers if b.name not in layout.offsets]
    if missing:
        raise UserError(f"cannot write {path}: the layout has no offset for buffer {missing[0]!r}; it belongs to other buffers")
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS if layout is None else (*COLUMNS, "offset"))
            for b in buffers:
                row = (b.name, b.lower, b.upper, b.size)
                writer.writerow(row if layout is None else (*row, layout.offsets[b.name]))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from error


def _read(path: Path, rows: "csv.DictReader[str]") -> list[Buffer]:
    header = rows.fieldnames or []
    absent = [column for column in COLUMNS if column not in header]
    if absent:
        raise UserError(f"{path}, line 1: no column {absent[0]!r}; seen {','.join(header)!r}, expected {','.join(COLUMNS)!r}")
    buffers: list[Buffer] = []
    first_line: dict[str, int] = {}
    for row in rows:
        where = f"{path}, line {rows.line_num}"
        name = row["id"]
        if name in first_line:
            raise UserError(f"{where}: buffer {name!r} was already given in line {first_line[name]}; each needs its own id")
        first_line[name] = rows.line_num
        lower, upper, size = (_whole_number(row[column], column, where) for column in COLUMNS[1:])
        try:
            buffers.append(Buffer(name, lower, upper, size))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return buffers


def _whole_number(text: str | None, column: str, where: str) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{where}: {column} is {text!r}; expected a whole number") from None
