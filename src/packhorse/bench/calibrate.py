"""`packhorse calibrate`: what operators take on this machine, as a device file.

Steps of small nets run as planned, each instruction timed by itself in the memory and the order in which it really runs, so that caches are as
warm as they are in training. One row an operator is fitted to the median times of its calls (device/fit.py). Then the seconds of whole steps of
other nets, which took no part in the fit, are predicted and measured. CPU only, whose link to the host is a copy in memory.

With --ranks, gathers and sums between so many processes of this machine are timed as well (links_job.py), and fitted to messages and bytes.

With one thread the clock is the thread's own CPU time, so that other processes do not count; with several it is the wall clock.
"""

import json
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import packhorse as ph
from packhorse.bench.calibration import CHECKS, NETS, Net
from packhorse.bench.jobs import run_job
from packhorse.device.device import Cost, Device, format_device, row_of
from packhorse.device.fit import Sample, fit, spread
from packhorse.device.links import Level, Link
from packhorse.device.touched import node_bytes
from packhorse.errors import UserError
from packhorse.planning.flops import node_flops
from packhorse.program.program import Call
from packhorse.runtime.step import Step

Clock = Callable[[], int]  # nanoseconds
ROUNDS = 5
COPIES = tuple(size << 20 for size in (8, 16, 32, 64))  # bytes, as saved values have
COLLECTIVES, JOB_SECONDS = 30, 120  # rounds of each, and at most for all


@dataclass(frozen=True)
class Checked:
    """Seconds of one step of a net that took no part in the fit."""

    net: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Calibration:
    """device: what was fitted. samples: row -> its kinds of calls. checks: how well it predicts whole steps."""

    device: Device
    samples: dict[str, list[Sample]]
    checks: list[Checked]


def prepared(net: Net) -> tuple[Step, dict[str, torch.Tensor]]:
    """The net's step, planned, compiled and run once, and its batch."""
    torch.manual_seed(0)
    model, batch = net.model().train(), net.batch()
    plan = ph.plan(model, batch, optimizer=net.optimizer(model.parameters()), precision=net.precision, clip_norm=1.0, recompute=net.recompute)
    step = ph.compile(model, plan)
    step(batch)
    return step, batch


class Timed:
    """A step that takes the time of each of its instructions from now on."""

    def __init__(self, step: Step, clock: Clock) -> None:
        self.programs = [(step.programs.planned[key].graph, step.programs.bound[key]) for key in step.ran]
        self.times: list[list[list[int]]] = []
        for _, bound in self.programs:
            seen: list[list[int]] = [[] for _ in bound.steps]
            bound.steps = [_timed(run, taken, clock) for run, taken in zip(bound.steps, seen, strict=True)]
            self.times.append(seen)

    def samples(self, clock_s: float) -> Iterator[tuple[str, tuple, Sample]]:
        """(row, what tells its kinds of calls apart, sample) of each call; a sample's seconds are the median less what the clock itself takes."""
        for (graph, bound), seen in zip(self.programs, self.times):
            for instruction, taken in zip(bound.program.instructions, seen):
                if isinstance(instruction, Call):
                    node = graph.nodes[instruction.time]
                    seconds = max(statistics.median(taken) * 1e-9 - clock_s, 1e-8)
                    kind = tuple((graph.values[name].shape, graph.values[name].strides) for name in node.arg_names())
                    yield row_of(node), kind, Sample(node_bytes(node, graph.values), node_flops(node, graph.values), seconds)


def _timed(run: Callable[[], Any], taken: list[int], clock: Clock) -> Callable[[], None]:
    def call() -> None:
        start = clock()
        run()
        taken.append(clock() - start)

    return call


def calibrate(nets: Sequence[Net], checks: Sequence[Net], rounds: int = ROUNDS, name: str = "cpu") -> Calibration:
    """Times `nets`, fits a device, and checks it on whole steps of `checks`. All take turns in each round, so that a machine whose speed drifts
    favours none."""
    clock: Clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    ready, tested = [prepared(net) for net in nets], [prepared(net) for net in checks]
    timed = [Timed(step, clock) for step, _ in ready]
    whole: list[list[int]] = [[] for _ in tested]
    clock_s = statistics.median(-(clock() - clock()) for _ in range(1000)) * 1e-9
    link = host_link(clock, rounds)
    for _ in range(rounds):
        for step, batch in ready:
            step(batch)
        for (step, batch), taken in zip(tested, whole):
            start = clock()
            step(batch)
            taken.append(clock() - start)
    kinds: dict[str, dict[tuple, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for number, one in enumerate(timed):
        for op, kind, sample in one.samples(clock_s):
            kinds[op][number, kind].append(sample)
    samples = {op: [replace(calls[0], seconds=statistics.median(c.seconds for c in calls)) for calls in seen.values()] for op, seen in kinds.items()}
    device = replace(fitted(samples, name), host_link=link)
    predicted = [sum(device.seconds(node, p.graph.values) for p in step.plan.programs.values() for node in p.graph.nodes) for step, _ in tested]
    measured = [statistics.median(taken) * 1e-9 for taken in whole]
    return Calibration(device, samples, [Checked(net.name, *seconds) for net, *seconds in zip(checks, predicted, measured)])


def host_link(clock: Clock, rounds: int = ROUNDS) -> Link:
    """Copies from one place in memory to another: what a CPU does where a GPU copies to its host."""
    samples = []
    for size in COPIES:
        source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        taken = []
        for _ in range(rounds + 1):
            start = clock()
            target.copy_(source)
            taken.append(clock() - start)
        samples.append(Sample(size, 0, statistics.median(taken[1:]) * 1e-9))  # the first one finds memory that nobody has touched
    return link_of(samples)


def link_of(samples: Sequence[Sample]) -> Link:
    """Messages of several sizes -> what carries them."""
    cost = fit(samples)
    return Link(cost.fixed_s, float(f"{1 / cost.s_per_byte:.4g}"))


def level(num_ranks: int) -> Level:
    """What joins so many processes of this machine. Raises JobError if they do not come to their end."""
    found = run_job("packhorse.bench.links_job", {"rounds": COLLECTIVES}, num_ranks, seconds=JOB_SECONDS)
    return level_of(found, num_ranks)


def level_of(found: Sequence[tuple[int, int, float]], num_ranks: int) -> Level:
    """(messages, bytes, seconds) of collectives -> their level, as `Device.collective_seconds` has it."""
    return Level("this machine", num_ranks, link_of([Sample(sent // messages, 0, seconds / messages) for messages, sent, seconds in found]))


def fitted(samples: dict[str, list[Sample]], name: str) -> Device:
    """One row an operator; operators without one cost what most of those without flops do."""
    rows = {op: fit(seen) for op, seen in samples.items()}
    other = fit([sample for seen in samples.values() for sample in seen if not sample.flops])
    threads = torch.get_num_threads()
    version = ".".join(torch.__version__.split(".")[:2])
    kind = f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"
    return Device(name, f"{kind}, {threads} thread{'s' * (threads > 1)}, torch {version}; written by packhorse calibrate", rows, other)


def table(made: Calibration) -> str:
    """What was measured, an operator a line, and how well it predicts."""
    lines = [f"{'operator':<62}{'calls':>6}{'fixed us':>10}{'GB/s':>9}{'GFLOP/s':>9}{'spread':>8}"]
    for op, seen in sorted(made.samples.items()):
        cost = made.device.rows[op]
        lines.append(f"{op:<62}{len(seen):>6}{_figures(cost)}{spread(seen, cost):>8.0%}")
    link = made.device.host_link
    lines.append(f"{'every other operator':<68}{_figures(made.device.other)}")
    if link is not None:
        lines.append(f"{'copy to or from the host':<68}{link.fixed_s * 1e6:>10.1f}{link.bytes_per_s * 1e-9:>9.1f}")
    for one in made.device.levels:
        lines.append(f"{f'a message between {one.ranks} processes':<68}{one.link.fixed_s * 1e6:>10.1f}{one.link.bytes_per_s * 1e-9:>9.1f}")
    lines += ["", "predicted / measured seconds of a step:"]
    lines += [f"  {c.net:<46}{c.predicted_s:8.4f} / {c.measured_s:.4f} = {c.predicted_s / c.measured_s:.2f}" for c in made.checks]
    return "\n".join(lines)


def _figures(cost: Cost) -> str:
    rates = "".join(f"{1e-9 / part:>9.1f}" if part else f"{'-':>9}" for part in (cost.s_per_byte, cost.s_per_flop))
    return f"{cost.fixed_s * 1e6:>10.1f}{rates}"


def run(write: Path | None, threads: int | None, ranks: int | None = None, *, as_json: bool) -> int:
    """The command. Raises UserError if the file cannot be written, before anything is measured."""
    if threads is not None and threads < 1:
        raise UserError(f"calibrate: --threads is {threads}, expected 1 or more")
    if ranks is not None and ranks < 2:
        raise UserError(f"calibrate: --ranks is {ranks}, expected 2 or more; leave it out for a machine of one rank")
    if write is not None:
        existed = write.exists()
        try:
            write.open("a").close()
            if not existed:
                write.unlink()
        except OSError as error:
            raise UserError(f"calibrate: cannot write the device file {write}: {error.strerror}; give a file in a folder that exists") from error
    torch.set_num_threads(threads or torch.get_num_threads())
    levels = () if ranks is None else (level(ranks),)
    made = calibrate(NETS, CHECKS, name="cpu" if write is None else write.stem)
    made = replace(made, device=replace(made.device, levels=levels))
    if write is not None:
        write.write_text(format_device(made.device), encoding="utf-8")
    checks = [asdict(check) for check in made.checks]
    print(json.dumps(asdict(made.device) | {"checks": checks}) if as_json else table(made))
    return 0
