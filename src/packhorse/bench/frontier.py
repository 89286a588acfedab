"""`packhorse bench frontier`: a budget against the peak and the time of a training step, for packhorse and every rival, interleaved in one run.

Peak of a rival: the most bytes that the allocator held in one forward and backward pass above what it held before, gradients in place already.
Of packhorse: arena and adopted tensors as measured, and what its kernels used besides. So neither counts parameters and gradients.
CPU seconds are the process's own, of a whole step (gradients to zero, forward, backward, SGD); ratios are the median over rounds of the ratio inside
a round. Each contestant has a copy of the model of its own. "At its peak" is packhorse planned within the peak that the rival was measured at.
With --cells: models x 8 budgets instead, see packhorse.bench.cells.
"""

import argparse
import copy
import gc
import json
import signal
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import packhorse
from packhorse.bench import cells
from packhorse.bench.chains import WORKLOADS, Chain
from packhorse.bench.frontier_page import picture, render
from packhorse.bench.recompute_rivals import Rival, rivals
from packhorse.bench.replan import replanned
from packhorse.bench.step import allocator_peak, cost, write_between
from packhorse.errors import UserError

BEGIN, END = "<!-- bench frontier: begin -->", "<!-- bench frontier: end -->"
CELLS_BEGIN, CELLS_END = "<!-- bench frontier cells: begin -->", "<!-- bench frontier cells: end -->"
METHODS = ("cheap", "sqrt", "chen", "recursive", "blocks")
NUM_BUDGETS = 8


@dataclass(frozen=True)
class Row:
    """What one contestant was found to do. None: not known, or not asked.

    peak_bytes: of the step without parameters and gradients; over_eager: the same over eager's. share, budget_bytes: what a rival, what packhorse was
    given. held: its peak was within that. exact: measured bytes are the predicted ones. extra_flops: of recomputation, over eager's flops. equal:
    gradients, buffers and loss against eager's, bit for bit ("yes", "no", "buffers differ"). time: CPU seconds over eager's. at_peak_*: packhorse
    within this row's peak: its own peak, its extra flops, its time over eager's, and over this row's time (at_peak_failure: there is none, and why).
    failure: why there is nothing else.
    """

    family: str
    name: str
    ours: bool = False
    peak_bytes: int | None = None
    over_eager: float | None = None
    share: float | None = None
    budget_bytes: int | None = None
    held: bool | None = None
    exact: bool | None = None
    extra_flops: float | None = None
    equal: str | None = None
    time: float | None = None
    at_peak_bytes: int | None = None
    at_peak_flops: float | None = None
    at_peak_time: float | None = None
    at_peak_ratio: float | None = None
    at_peak_failure: str = ""
    failure: str = ""


@dataclass(frozen=True)
class Contestant:
    """A row, and one step of it to take the time of (None if it failed)."""

    row: Row
    step: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Reference:
    """Eager's first step: loss, gradients, buffers; its flops and its peak of intermediates in bytes."""

    loss: float
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    flops: int
    peak_bytes: int

    def verdict(self, loss: float, gradients: dict[str, Tensor], buffers: dict[str, Tensor]) -> str:
        """ "yes" if all is the same bit for bit, "buffers differ" if gradients and loss are, else "no"."""
        if loss != self.loss or any(name not in gradients or not torch.equal(g, gradients[name]) for name, g in self.gradients.items()):
            return "no"
        return "yes" if all(torch.equal(b, buffers[name]) for name, b in self.buffers.items()) else "buffers differ"


# -- rivals --------------------------------------------------------------------------------------------------------------------------


class OutOfTime(BaseException):
    """Not an Exception, so that no handler of a compiler takes it for a failure of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime inside it after so many seconds on the clock. Main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    handler, timer = signal.signal(signal.SIGALRM, stop), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def _attention_flops(query: Any, key: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 4 * query[0] * query[1] * query[2] * query[3] * key[2]


def _attention_backward_flops(grad: Any, query: Any, key: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    return 10 * query[0] * query[1] * query[2] * query[3] * key[2]


# torch counts attention on a GPU alone; as packhorse.planning.flops counts it
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


def flops_of(run: Callable[[], Any]) -> int:
    """Flops of products, convolutions and attention that eager PyTorch runs in it."""
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        run()
    return counter.get_total_flops()


def _gradients(model: Chain) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def enter_rival(
    rival: Rival, model: Chain, batch: dict[str, Tensor], reference: Reference | None, seconds: float
) -> tuple[Contestant, Reference | None]:
    """The rival on its own copy of the model: compared with eager, measured, and ready to be timed. Of eager itself the reference comes back too."""
    mine = copy.deepcopy(model)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
    row = Row(rival.family, rival.name, share=rival.share)
    try:
        with time_limit(seconds), rival.settings():
            forward = rival.make(mine)

            def both_passes() -> Tensor:
                loss = forward(**batch)
                loss.backward()
                return loss.detach()

            torch.manual_seed(1)
            loss = both_passes().item()
            gradients, buffers = _gradients(mine), {name: b.clone() for name, b in mine.named_buffers()}
            both_passes()
            peak = allocator_peak(both_passes)
            flops = 0 if rival.compiled else flops_of(both_passes)
    except OutOfTime:
        return Contestant(replace(row, failure=f"not ready after {seconds:g} s")), reference
    except Exception as error:  # a rival may fail in any way, and the others still stand
        return Contestant(replace(row, failure=f"{type(error).__name__}: {_first_line(error)}")), reference
    reference = reference or Reference(loss, gradients, buffers, flops, peak)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        both_passes()
        optimizer.step()

    row = replace(
        row,
        peak_bytes=peak,
        over_eager=peak / reference.peak_bytes,
        extra_flops=None if rival.compiled else flops / reference.flops - 1,
        equal=reference.verdict(loss, gradients, buffers),
    )
    return Contestant(row, step), reference


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:160]


# -- packhorse -----------------------------------------------------------------------------------------------------------------------


class Ours:
    """packhorse on one model and batch. `none`: the plan that keeps everything; outside_bytes: what its kernels use besides what was planned."""

    def __init__(self, model: Chain, batch: dict[str, Tensor], reference: Reference):
        self.model, self.batch, self.reference = model, batch, reference
        self.none, self.entry = self._enter("none", None)
        self.seen: dict[int, Contestant] = {}

    def _enter(self, method: str, budget: int | str | None, name: str = "") -> tuple[Any, Contestant]:
        mine, reference = copy.deepcopy(self.model), self.reference
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.0)
        if method == "none":
            plan = packhorse.plan(mine, self.batch, optimizer=optimizer, recompute="none")
        else:
            plan = replanned(self.none, mine, optimizer, method, budget)
        step = packhorse.compile(mine, plan)
        torch.manual_seed(1)
        loss = step(self.batch).item()
        equal = reference.verdict(loss, step.grads(), dict(mine.named_buffers()))
        step(self.batch, measure_outside=True)
        ledger = step.ledger()
        measured, outside = dict(ledger.measured), ledger.outside_bytes
        assert outside is not None and ledger.measured_peak_bytes is not None
        if method == "none":
            self.outside_bytes = outside
        peak = measured["arena"] + measured["external"] + outside
        row = Row(
            "packhorse" if method == "none" else f"packhorse {method}",
            name or f"packhorse, {method}",
            True,
            peak,
            peak / reference.peak_bytes,
            budget_bytes=budget if isinstance(budget, int) else None,
            held=ledger.measured_peak_bytes <= budget if isinstance(budget, int) else None,
            exact=ledger.measured_peak_bytes == plan.peak_bytes == ledger.predicted_peak_bytes,
            extra_flops=plan.overhead_flops / (plan.flops - plan.overhead_flops),
            equal=equal,
        )
        return plan, Contestant(row, lambda: step(self.batch))

    def enter(self, method: str, budget: int | str | None, name: str) -> Contestant:
        """A plan of a method and what came of it; what packhorse refuses is the row's failure."""
        try:
            return self._enter(method, budget, name)[1]
        except UserError as error:
            return Contestant(
                Row(f"packhorse {method}", name, True, budget_bytes=budget if isinstance(budget, int) else None, failure=_first_line(error))
            )

    def budgets(self) -> list[Contestant]:
        """`optimal` at budgets in equal steps from all to the least that works."""
        try:
            least, entry = self._enter("optimal", "minimum", "packhorse, optimal, the least")
        except UserError as error:
            return [Contestant(Row("packhorse optimal", "packhorse, optimal, the least", True, failure=_first_line(error)))]
        span = self.none.peak_bytes - least.peak_bytes
        found = []
        for part in range(NUM_BUDGETS - 1, 0, -1):
            budget = least.peak_bytes + span * part // (NUM_BUDGETS - 1)
            found.append(self.enter("optimal", budget, f"packhorse, optimal, {budget / self.none.peak_bytes:.0%} of the whole step"))
        row = replace(entry.row, budget_bytes=least.peak_bytes, held=entry.row.exact)
        return [*found, replace(entry, row=row)]

    def within(self, peak: int) -> Contestant:
        """`optimal` within a rival's peak: budget = persistent bytes + that peak - what kernels use besides, which is known only once it has run."""
        budget, found = self.none.persistent_bytes + peak - self.outside_bytes, self.entry
        for _ in range(3):
            if budget < self.none.peak_bytes:
                if budget not in self.seen:
                    self.seen[budget] = self.enter("optimal", budget, f"packhorse within {peak} bytes")
                found = self.seen[budget]
            if found.row.peak_bytes is None or found.row.peak_bytes <= peak:
                return found
            budget -= found.row.peak_bytes - peak
        return Contestant(replace(found.row, failure=f"takes {found.row.peak_bytes} bytes and no less"))


# -- the run -------------------------------------------------------------------------------------------------------------------------


def race(contestants: list[Contestant], rounds: int) -> list[list[float]]:
    """CPU seconds of each one's step in each round; empty for those that failed. One round runs all of them once."""
    seconds: list[list[float]] = [[] for _ in contestants]
    gc.collect()
    gc.freeze()  # what preparing left behind is nobody's cost
    for _ in range(rounds):
        for place, contestant in enumerate(contestants):
            if contestant.step is not None:
                seconds[place].append(cost(contestant.step).cpu_s)
    gc.unfreeze()
    return seconds


def _ratio(numerator: list[float], denominator: list[float]) -> float | None:
    return statistics.median(n / d for n, d in zip(numerator, denominator)) if numerator and denominator else None


def _rival_held(row: Row, whole: dict[str, int]) -> bool | None:
    """Its peak is within its share of what the same compiler's step takes when it may keep all it wants. A share of 0 asks for the least there is."""
    if row.share is None or row.peak_bytes is None or not 0 < row.share < 1 or row.family not in whole:
        return None
    return row.peak_bytes <= row.share * whole[row.family]


def measure(model: Chain, batch: dict[str, Tensor], entered: list[Rival], rounds: int, seconds: float, say: Callable[[str], None]) -> list[Row]:
    """All rows, rivals first. say: is told of each row as soon as it stands."""
    first, reference = enter_rival(entered[0], model, batch, None, seconds)
    if reference is None:
        raise UserError(f"bench frontier: eager PyTorch itself failed: {first.row.failure}")
    theirs = [first]
    for rival in entered[1:]:
        theirs.append(enter_rival(rival, model, batch, reference, seconds)[0])
        say(_progress(theirs[-1].row, reference))
    whole = {c.row.family: c.row.peak_bytes for c in theirs if c.row.share == 1 and c.row.peak_bytes is not None}
    theirs = [replace(c, row=replace(c.row, held=_rival_held(c.row, whole))) for c in theirs]
    ours = Ours(model, batch, reference)
    mine = [ours.entry]
    say(_progress(ours.entry.row, reference))
    for contestant in ours.budgets() + [ours.enter(method, None, f"packhorse, {method}") for method in METHODS]:
        mine.append(contestant)
        say(_progress(contestant.row, reference))
    partners = []
    for contestant in theirs:
        peak = contestant.row.peak_bytes
        partners.append(None if peak is None else ours.within(peak))
        if partners[-1] is not None:
            say(f"at the peak of {contestant.row.name}: {_progress(partners[-1].row, reference)}")
    everyone = [*theirs, *mine, *ours.seen.values()]
    places = {id(contestant): place for place, contestant in enumerate(everyone)}
    times = race(everyone, rounds)
    rows = []
    for place, contestant in enumerate([*theirs, *mine]):
        row = replace(contestant.row, time=_ratio(times[place], times[0]))
        partner = partners[place] if place < len(theirs) else None
        if partner is not None and partner.step is None:
            row = replace(row, at_peak_failure=partner.row.failure)
        elif partner is not None:
            its = times[places[id(partner)]]
            row = replace(
                row,
                at_peak_bytes=partner.row.peak_bytes,
                at_peak_flops=partner.row.extra_flops,
                at_peak_time=_ratio(its, times[0]),
                at_peak_ratio=_ratio(its, times[place]),
            )
        rows.append(row)
    broken = [c.row for c in ours.seen.values() if c.row.held is False or c.row.exact is False or c.row.equal in ("no", "buffers differ")]
    return rows + broken  # a plan within a rival's peak gets a line of its own only where it broke a promise


def _progress(row: Row, reference: Reference) -> str:
    if row.failure:
        return f"{row.name}: {row.failure}"
    assert row.peak_bytes is not None
    return f"{row.name}: {row.peak_bytes / 2**20:.2f} MiB, {row.peak_bytes / reference.peak_bytes:.3f} of eager's, gradients equal: {row.equal}"


def kept_its_word(rows: list[Row]) -> bool:
    """Every plan of packhorse that ran held its budget, was exact and gave eager's bits."""
    ran = [row for row in rows if row.ours and not row.failure]
    return all(row.held is not False and row.exact and row.equal == "yes" for row in ran)


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if packhorse kept all its promises, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench frontier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="transformer-24", choices=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds on the clock for a rival to be made ready")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--no-inductor", action="store_true", help="leave out what needs a C++ compiler")
    parser.add_argument("--quick", action="store_true", help="one or two rivals of each family, nothing through inductor")
    parser.add_argument("--cells", nargs="*", metavar="MODEL", help="models x 8 budgets instead (all of them without a name)")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    parser.add_argument("--picture", type=Path, help="SVG file to write")
    asked = parser.parse_args(arguments)
    if asked.rounds < 1 or asked.threads < 1 or asked.time_limit <= 0:
        raise UserError(
            f"bench frontier: --rounds {asked.rounds} --threads {asked.threads} --time-limit {asked.time_limit}: expected more than 0 of each"
        )
    begin, end = (BEGIN, END) if asked.cells is None else (CELLS_BEGIN, CELLS_END)
    if asked.write:
        write_between(asked.write, begin, end, None)  # a file that cannot take the table is said before the work
    if asked.picture and not asked.picture.parent.is_dir():
        raise UserError(f"bench frontier: --picture {asked.picture}: there is no folder {asked.picture.parent}")
    torch.set_num_threads(asked.threads)
    say: Callable[[str], None] = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if asked.cells is not None:
            outcomes = cells.measure(asked.cells, say)
            text, found, good = cells.render(outcomes), {"cells": [asdict(o) for o in outcomes]}, all(o.kept for o in outcomes)
        else:
            workload = WORKLOADS[asked.model]
            torch.manual_seed(0)
            model, batch = workload.make().train(), workload.batch()
            entered = rivals(model, inductor=not (asked.no_compile or asked.no_inductor), aot=not asked.no_compile, quick=asked.quick)
            rows = measure(model, batch, entered, asked.rounds, asked.time_limit, say)
            text = render(rows, workload.title, asked.threads, asked.rounds)
            found, good = {"model": asked.model, "rounds": asked.rounds, "rows": [asdict(row) for row in rows]}, kept_its_word(rows)
            if asked.picture:
                asked.picture.write_text(picture(rows, workload.title))
    print(json.dumps(found) if as_json else "\n" + text)
    if asked.write:
        write_between(asked.write, begin, end, text)
    return int(not good)
