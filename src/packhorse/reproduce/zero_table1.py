"""`packhorse reproduce zero`: table 1 of Rajbhandari et al. 2019, arXiv:1910.02054: model states on a device, by data parallel degree and stage.

The paper's sizes are round numbers of parameters. Ours are GPTs of about as many: their storage, times nominal over real number of parameters, is
what the paper prints; their storage as it is, to the byte, is the paper's formula with our padding.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor

from packhorse.models.sizes import GPT_SIZES, PADDED_VOCAB, Size
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.zero_storage import DEVICE_BYTES, GIGABYTE, STAGES, Prepared, counted_bytes, prepared, state_bytes

DEGREES = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Column:
    """A size of the table. nominal: parameters. printed: stage -> gigabytes as the paper prints them, by degree. first: stage -> the first degree in
    bold, at which the states fit a V100 of 32 GB."""

    name: str
    nominal: int
    size: Size
    printed: dict[int, tuple[str, ...]]
    first: dict[int, int]


TABLE = (
    Column(
        "7.5B",
        7_500_000_000,
        Size(36, 4096, 32, PADDED_VOCAB),
        {
            1: ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
            2: ("120", "41.3", "21.6", "16.6", "15.4", "15.1"),
            3: ("120", "30", "7.5", "1.88", "0.47", "0.12"),
        },
        {1: 64, 2: 16, 3: 4},
    ),
    Column(
        "128B",
        128_000_000_000,
        Size(70, 12288, 96, PADDED_VOCAB),
        {
            1: ("2048", "896", "608", "536", "518", "513"),
            2: ("2048", "704", "368", "284", "263", "257"),
            3: ("2048", "512", "128", "32", "8", "2"),
        },
        {3: 64},
    ),
    Column(
        "1T",
        1_000_000_000_000,
        GPT_SIZES["megatron-1t"],
        {
            1: ("16000", "7000", "4750", "4187", "4046", "4011"),
            2: ("16000", "5500", "2875", "2218", "2054", "2013"),
            3: ("16000", "4000", "1000", "250", "62.5", "15.6"),
        },
        {3: 1024},
    ),
)


@dataclass(frozen=True)
class Cell:
    """One figure of the table. num_bytes: of our storage; counted: by the formula, with padding; gigabytes: scaled to the nominal size."""

    column: str
    parameters: int
    dp: int
    stage: int
    printed: str
    num_bytes: int
    counted: int
    gigabytes: float

    @property
    def is_as_printed(self) -> bool:
        """Rounded or cut off at the digits that the paper gives: some columns are rounded (41.25 is 41.3), some are cut off."""
        scale = 10 ** len(self.printed.partition(".")[2])
        return round(float(self.printed) * scale) in (floor(self.gigabytes * scale), floor(self.gigabytes * scale + 0.5))


def cells(column: Column, given: Prepared) -> Iterator[Cell]:
    """Of every degree and stage."""
    tensors = [(name, p.numel()) for name, p in given.model.named_parameters()]
    for stage, printed in column.printed.items():
        for dp, text in zip(DEGREES, printed, strict=True):
            found = state_bytes(given, dp, stage)
            scaled = found * column.nominal / given.parameters / GIGABYTE
            yield Cell(column.name, given.parameters, dp, stage, text, found, counted_bytes(tensors, dp, stage), scaled)


def table1() -> Iterator[Cell]:
    """Of every size."""
    for column in TABLE:
        yield from cells(column, prepared(column.size))


def claims(found: list[Cell]) -> Iterator[Claim]:
    """What the paper says of them."""
    for column in TABLE:
        mine = [cell for cell in found if cell.column == column.name]
        right, exact = sum(cell.is_as_printed for cell in mine), sum(cell.num_bytes == cell.counted for cell in mine)
        yield Claim(f"{column.name}: gigabytes of model states", f"{len(mine)} cells", f"{right} are as printed", right == len(mine))
        text = f"{exact} of {len(mine)} to the byte, padding and step counts included"
        yield Claim(f"{column.name}: bytes of our storage", "16 Psi; 4 Psi + 12 Psi/N; 2 Psi + 14 Psi/N; 16 Psi/N", text, exact == len(mine))
        fits = {stage: _first_that_fits([cell for cell in mine if cell.stage == stage]) for stage in column.printed}
        wanted = {stage: column.first.get(stage) for stage in column.printed}
        yield Claim(f"{column.name}: first degree that fits 32 GB", _degrees(wanted), _degrees(fits), fits == wanted)


def _first_that_fits(cells: list[Cell]) -> int | None:
    return min((cell.dp for cell in cells if cell.gigabytes * GIGABYTE <= DEVICE_BYTES), default=None)


def _degrees(of_stage: dict[int, int | None]) -> str:
    return ", ".join(f"{STAGES[stage]} {'none' if dp is None else dp}" for stage, dp in of_stage.items())


def table(found: list[Cell]) -> str:
    """Markdown: the paper's table with our figures beside it, then the bytes they come from."""
    stages = tuple(TABLE[0].printed)
    columns = [(column, stage) for column in TABLE for stage in stages]
    at = {(cell.column, cell.stage, cell.dp): cell for cell in found}
    sizes = {cell.column: cell.parameters for cell in found}
    models = "; ".join(f"{c.name} is {c.size.layers} layers of {c.size.width} channels, {sizes[c.name]:,} parameters" for c in TABLE)
    lines = [
        f"{models}. GB of model states on one device, the paper's / ours at its number of parameters:",
        "",
        "| dp | " + " | ".join(f"{column.name} {STAGES[stage]}" for column, stage in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for dp in DEGREES:
        row = [at[column.name, stage, dp] for column, stage in columns]
        lines.append(f"| {dp} | " + " | ".join(f"{cell.printed} / {cell.gigabytes:.6g}" for cell in row) + " |")
    lines += ["", "Bytes of rank 0 as they would be allocated:", "", lines[2], lines[3]]
    for dp in DEGREES:
        lines.append(f"| {dp} | " + " | ".join(f"{at[column.name, stage, dp].num_bytes:,}" for column, stage in columns) + " |")
    return "\n".join(lines)
