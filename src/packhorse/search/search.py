"""Which strategy trains a model fastest on so many devices: every one that might fit is priced by plans of a few blocks, grown to the whole depth."""

import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from packhorse.device.device import Device
from packhorse.errors import UserError
from packhorse.search.grow import grown
from packhorse.search.short import Short
from packhorse.search.strategy import Needs, Strategy

DEPTHS = (3, 4)  # of the plans that the others are grown from
VARIANTS = (("none", "keep"), ("blocks", "keep"), ("blocks", "shard"), ("blocks", "offload"))
CONFIRMED = 4  # strategies, the fastest and those nearest to it, are laid out before they are believed


@dataclass(frozen=True)
class Priced:
    """A strategy with what its step needs; why: what forbids it, "" if it fits."""

    strategy: Strategy
    needs: Needs | None
    why: str = ""

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        assert self.needs is not None
        return self.strategy.samples * self.strategy.dp * self.strategy.num_micro_batches / self.needs.seconds


@dataclass(frozen=True)
class Answer:
    """best: the fastest strategy that fits, if any does; nearest: the next ones; failures: one for each mesh and stage of which none fits. fitting:
    all that were taken to fit, the fastest first, of which only best and nearest are laid out."""

    best: Priced | None
    nearest: tuple[Priced, ...]
    failures: tuple[Priced, ...]
    fitting: tuple[Priced, ...] = ()


@dataclass(frozen=True)
class Within:
    """What a search may use. num_ranks: devices, all of them. batches: (samples of a micro-batch on each dp rank, micro-batches of a step) to choose
    from, in ascending order of samples. usable: bytes of each device. tp, stage: only these, where given. processes: that plan side by side."""

    num_ranks: int
    batches: tuple[tuple[int, int], ...]
    usable: int
    tp: int | None = None
    stage: int | None = None
    processes: int = 2


def doublings(most: int) -> tuple[tuple[int, int], ...]:
    """Micro-batches of 1, 2, 4, .. samples, at most `most`, one in a step."""
    return tuple((1 << k, 1) for k in range(most.bit_length()) if 1 << k <= most)


def usable_bytes(device: Device) -> int:
    """Bytes that a step may take. Raises UserError for a device file that does not say how much memory there is."""
    if device.memory_bytes is None:
        raise UserError(
            f"the device file {device.name!r} does not say how much memory the device has (memory), so nothing can be said to fit; take one that "
            "does, such as v100-dgx2 or h100-80, or add the key"
        )
    return int(device.memory_bytes * device.usable)


def search(short: Short, within: Within, say: Callable[[str], None] = lambda text: None) -> Answer:
    """The fastest strategy on `within.num_ranks` ranks of the device, and its neighbours. Deterministic.

    Raises UserError for a topology that does not hold the ranks.
    """
    usable = within.usable
    if within.num_ranks < 1:
        raise UserError(f"a search over {within.num_ranks} devices: expected 1 or more")
    if short.device.levels:
        short.device.level_of(within.num_ranks)
    failures: list[Priced] = []
    groups = []
    states = _states(short)
    refused: dict[int, str] = {}
    for strategy in _meshes(short, within):
        if strategy.tp not in refused:
            refused[strategy.tp] = _refused(short, strategy)
        why = refused[strategy.tp] or _too_large(states, strategy, usable)
        if why:
            failures.append(Priced(strategy, None, why))
        else:
            groups.append(strategy)
    say(f"{len(groups)} of {len(groups) + len(failures)} meshes and stages may fit by their model states")
    variants = [v for v in VARIANTS if v[1] != "offload" or short.host_budget]
    asked = [replace(s, recompute=v[0], residency=v[1]) for s in groups for v in variants if v[1] != "shard" or s.tp > 1]
    every: list[Priced] = []
    for one in _side_by_side(short, within, asked):
        every.append(one)
        say(f"{one.strategy}: " + (one.why or f"{one.samples_per_s:.1f} samples/s"))
    fitting = sorted((p for p in every if not p.why), key=lambda p: (-p.samples_per_s, p.strategy))
    confirmed: list[Priced] = []
    for one in fitting:
        if len(confirmed) == CONFIRMED:
            break
        sure = confirm(short, one.strategy, usable)
        if not sure.why:
            confirmed.append(sure)
            say(f"{sure.strategy}, planned: {sure.samples_per_s:.1f} samples/s")
    confirmed.sort(key=lambda p: (-p.samples_per_s, p.strategy))
    held = {(p.strategy.tp, p.strategy.stage) for p in every if not p.why}
    for one in sorted(every, key=lambda p: p.strategy):
        if one.why and (one.strategy.tp, one.strategy.stage) not in held:
            failures.append(one)
    return Answer(confirmed[0] if confirmed else None, tuple(confirmed[1:]), tuple(failures), tuple(fitting))


def confirm(short: Short, strategy: Strategy, usable: int) -> Priced:
    """A strategy with offsets: the arena is as much higher than what is alive as that of a few blocks. Only the depth is grown."""
    depths = _depths(short)
    needs = grown({d: short.needs(strategy, d, sketch=True) for d in depths}, short.depth)
    laid_out, sketched = (short.needs(strategy, depths[-1], sketch).arena for sketch in (False, True))
    needs = replace(needs, arena=needs.arena * max(1.0, laid_out / max(sketched, 1.0)))
    return Priced(strategy, needs, _over(needs, usable, short.device))


def _meshes(short: Short, within: Within) -> Iterable[Strategy]:
    """Every mesh and stage: tp within the first level of the machine, dp the rest."""
    most = short.device.levels[0].ranks if short.device.levels else within.num_ranks
    for tp in range(1, min(most, within.num_ranks) + 1):
        if within.num_ranks % tp or (within.tp is not None and tp != within.tp):
            continue
        dp = within.num_ranks // tp
        for stage in range(4) if dp > 1 else (0,):
            if within.stage is None or stage == within.stage or dp == 1:
                yield Strategy(dp, tp, stage, 1, "blocks", "keep")


def _refused(short: Short, strategy: Strategy) -> str:
    """Why the model cannot be split over so many ranks; "" if it can."""
    if strategy.tp == 1:
        return ""
    try:
        short.sharding(strategy)
    except UserError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class _States:
    """Bytes of the whole model's parameters, gradients, and optimizer states with master weights."""

    parameters: float
    gradients: float
    optimizer: float


def _states(short: Short) -> _States:
    """By plans of one rank, grown."""
    alone = Strategy(1, 1, 0, 1, "blocks", "keep")
    depths = _depths(short)
    found = []
    for depth in depths:
        kinds = short.plan(alone, depth, sketch=True).persistent.bytes_by_kind()
        found.append((kinds["parameters"], kinds.get("gradients", 0), kinds.get("optimizer states", 0) + kinds.get("master weights", 0)))
    more = short.depth - depths[-1]
    return _States(*(last + more * (last - first) if len(found) > 1 else last for first, last in zip(found[0], found[-1])))


def _too_large(states: _States, strategy: Strategy, usable: int) -> str:
    """Why the model states alone do not fit; "" if they may. At least so many bytes are on each rank (ZeRO, section 5)."""
    dp, stage = strategy.dp, strategy.stage
    least = states.parameters / (dp if stage == 3 else 1) + states.gradients / (dp if stage >= 2 else 1) + states.optimizer / (dp if stage else 1)
    least /= strategy.tp
    return f"model states alone take {least / 1e9:.1f} GB of {usable / 1e9:.1f} GB" if least > usable else ""


def _depths(short: Short) -> tuple[int, ...]:
    """Of the plans that all others are grown from."""
    return DEPTHS if short.depth > DEPTHS[-1] else (short.depth,)


def _side_by_side(short: Short, within: Within, asked: list[Strategy]) -> Iterable[Priced]:
    """Every strategy with the batch that suits it, by processes that are forked: they have what was captured."""
    if asked:
        _learn(short, within)
    with ProcessPoolExecutor(within.processes, multiprocessing.get_context("fork"), _start, (short, within)) as pool:
        yield from pool.map(_in_this_process, asked)


def priced(short: Short, within: Within, asked: Iterable[Strategy]) -> Iterable[Priced]:
    """Every strategy with the batch that suits it: the largest that fits, or the one before it where that is faster; the smallest one, and why not,
    if none does."""
    _learn(short, within)
    return (_with_its_batch(short, within, strategy) for strategy in asked)


def _learn(short: Short, within: Within) -> None:
    short.learn(_depths(short), [samples for samples, _ in within.batches])


_planning: list[tuple[Short, Within]] = []  # of a forked process: what it plans. Modules and graphs are inherited, not sent


def _start(short: Short, within: Within) -> None:
    _planning.append((short, within))


def _in_this_process(strategy: Strategy) -> Priced:
    return _with_its_batch(*_planning[0], strategy)


def _with_its_batch(short: Short, within: Within, strategy: Strategy) -> Priced:
    known: dict[int, Priced] = {}

    def at(place: int) -> Priced:
        if place not in known:
            samples, micros = within.batches[place]
            one = replace(strategy, samples=samples, num_micro_batches=micros)
            needs = grown({d: short.needs(one, d, sketch=True) for d in _depths(short)}, short.depth)
            known[place] = Priced(one, needs, _over(needs, within.usable, short.device))
        return known[place]

    low, high = 0, len(within.batches)  # the first that does not fit lies in between
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle).why else (middle + 1, high)
    if low == 0:
        return at(0)
    return max((at(place) for place in range(max(0, low - 2), low)), key=lambda one: one.samples_per_s)


def _over(needs: Needs, usable: int, device: Device) -> str:
    if needs.peak > usable:
        return f"takes {needs.peak / 1e9:.1f} GB of {usable / 1e9:.1f} GB ({needs.persistent / 1e9:.1f} GB model states)"
    if needs.host and device.host_memory_bytes is not None and needs.host > device.host_memory_bytes:
        return f"takes {needs.host / 1e9:.1f} GB of the host, which has {device.host_memory_bytes / 1e9:.1f} GB for each rank"
    return ""
