"""`packhorse reproduce zero`: how large a model the stages allow (table 2 of Rajbhandari et al. 2019, arXiv:1910.02054), and which of the paper's
models fit and do not fit as far as model states alone decide it. What does not fit by its states does not fit; what fits still needs its activations.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from packhorse.models.sizes import PADDED_VOCAB, Size, find_size
from packhorse.reproduce.claims import Claim
from packhorse.reproduce.zero_storage import DEVICE_BYTES, GIGABYTE, STAGES, Prepared, prepared, state_bytes

BILLION = 10**9
BUDGET_BYTES = 32 * GIGABYTE  # of table 2
DP = 64  # in every row of table 2
MODEL = Size(70, 12288, 96, PADDED_VOCAB)  # of which bytes a parameter are taken
# tp -> parameters by stage 0 to 3, theoretical columns
TABLE = {
    1: ("2B", "7.6B", "14.4B", "128B"),
    2: ("4B", "15.2B", "28.8B", "256B"),
    4: ("8B", "30.4B", "57.6B", "0.5T"),
    8: ("16B", "60.8B", "115.2B", "1T"),
    16: ("32B", "121.6B", "230.4B", "2T"),
}
UNITS = {"B": BILLION, "T": 1000 * BILLION}
TOLERANCE = 0.01  # the paper doubles its rounded first row


@dataclass(frozen=True)
class Largest:
    """The most parameters that tp x 64 ranks can train by their states. state_bytes: of one rank, with MODEL."""

    tp: int
    stage: int
    printed: str
    state_bytes: int
    parameters: float

    @property
    def is_as_printed(self) -> bool:
        """Within 1 %, or the same number at the digits printed ("0.5T")."""
        number, unit = float(self.printed[:-1]), UNITS[self.printed[-1]]
        digits = len(self.printed[:-1].partition(".")[2])
        return abs(self.parameters / (number * unit) - 1) <= TOLERANCE or round(self.parameters / unit, digits) == number


@dataclass(frozen=True)
class Fit:
    """A run that the paper speaks of. fits: as it says."""

    name: str
    dp: int
    tp: int
    stage: int
    fits: bool


FITS = (
    Fit("zero-dp-13b", 128, 1, 2, True),
    Fit("zero-dp-13b", 128, 1, 0, False),
    Fit("zero-100b", 25, 16, 2, True),
    Fit("zero-100b", 25, 16, 0, False),
    Fit("zero-170b", 25, 16, 2, True),
    Fit("zero-170b", 25, 16, 0, False),
    Fit("megatron-1t", 1024, 1, 3, True),
    Fit("megatron-1t", 64, 16, 3, True),
    Fit("megatron-1t", 1024, 1, 0, False),
    Fit("megatron-1t", 64, 16, 0, False),
    # the baseline of figure 2 takes the least tp, a power of two, with which it runs: 16 for 20B, 32 for 40B
    Fit("zero-20b", 50, 8, 0, False),
    Fit("zero-40b", 25, 16, 0, False),
)


@dataclass(frozen=True)
class Fitted:
    """A Fit, and the bytes of model states of its rank 0. parameters: of the whole model."""

    of: Fit
    parameters: int
    state_bytes: int

    @property
    def fits(self) -> bool:
        return self.state_bytes <= DEVICE_BYTES


def largest(given: Prepared) -> Iterator[Largest]:
    """Every cell of the table: states grow with the parameters, so the most is the budget over bytes a parameter."""
    for tp, row in TABLE.items():
        for stage, printed in enumerate(row):
            found = state_bytes(given, DP, stage, tp)
            yield Largest(tp, stage, printed, found, given.parameters * BUDGET_BYTES / found)


def fitted() -> Iterator[Fitted]:
    """Every line of FITS."""
    for name in dict.fromkeys(fit.name for fit in FITS):
        given = prepared(find_size("gpt", name))
        yield from (Fitted(fit, given.parameters, state_bytes(given, fit.dp, fit.stage, fit.tp)) for fit in FITS if fit.name == name)


def sizes() -> tuple[list[Largest], list[Fitted]]:
    """All of it."""
    return list(largest(prepared(MODEL))), list(fitted())


def claims(table2: list[Largest], runs: list[Fitted]) -> Iterator[Claim]:
    """What the paper says of them."""
    for stage, name in STAGES.items():
        mine = [cell for cell in table2 if cell.stage == stage]
        ours = ", ".join(_size(cell) for cell in mine)
        yield Claim(f"largest model, {name}, tp {', '.join(str(c.tp) for c in mine)}", ", ".join(c.printed for c in mine), ours, _all(mine))
    for run in runs:
        where = f"{run.of.name}, {run.of.dp * run.of.tp:,} GPUs, tp {run.of.tp}, {STAGES[run.of.stage]}"
        said = "fits" if run.of.fits else "does not fit"
        text = f"{run.state_bytes / GIGABYTE:.1f} GB of states: {'fit' if run.fits else 'do not fit'} 32 GB"
        yield Claim(where, said, text, run.fits == run.of.fits)


def _all(cells: list[Largest]) -> bool:
    return all(cell.is_as_printed for cell in cells)


def _size(cell: Largest) -> str:
    """In the paper's unit, with four digits."""
    unit = cell.printed[-1]
    return f"{cell.parameters / UNITS[unit]:.4g}{unit}"


def table(table2: list[Largest], runs: list[Fitted]) -> str:
    """Two Markdown tables."""
    lines = [
        f"Bytes of model states of rank 0 of tp x {DP} ranks, for a GPT of {MODEL.layers} layers of {MODEL.width} channels. From bytes a parameter "
        f"follow the largest models in {BUDGET_BYTES // GIGABYTE} GB:",
        "",
        "| tp | " + " | ".join(STAGES.values()) + " |",
        "|---" * (len(STAGES) + 1) + "|",
    ]
    for tp in TABLE:
        lines.append(f"| {tp} | " + " | ".join(f"{cell.state_bytes:,}" for cell in table2 if cell.tp == tp) + " |")
    lines += ["", "Model states of rank 0 of the paper's runs:", "", "| model | parameters | dp | tp | stage | bytes |", "|---|---|---|---|---|---|"]
    lines += [f"| {r.of.name} | {r.parameters:,} | {r.of.dp} | {r.of.tp} | {STAGES[r.of.stage]} | {r.state_bytes:,} |" for r in runs]
    return "\n".join(lines)
