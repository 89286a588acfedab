"""What of the predicted seconds of a step is computation, and what runs beside it on each stream. No torch."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from packhorse.device.device import Device
from packhorse.planning.plan import Plan
from packhorse.planning.timeline import COMPUTATION, Timeline, timeline

ROUNDING = 1e-9  # of sums of floats
_COPIES = ("to host", "from host")  # the streams of the device's host_link; the others are of its levels


@dataclass(frozen=True)
class StepSeconds:
    """A step, every program as often as it runs. busy: stream -> seconds in use, COMPUTATION first; stalls: stream -> seconds that the computation
    waits for it. What is not waited for is hidden behind the computation."""

    seconds: float
    busy: dict[str, float]
    stalls: dict[str, float]

    @property
    def streams(self) -> list[str]:
        """All but the computation."""
        return [stream for stream in self.busy if stream != COMPUTATION]


def timelines(plan: Plan) -> dict[str, Timeline]:
    """Program -> one run of it, as the plan's device foretells it."""
    return {name: timeline(planned.graph, plan.device, plan.options.mesh) for name, planned in plan.programs.items()}


def step_seconds(plan: Plan, lines: Mapping[str, Timeline] | None = None) -> StepSeconds:
    """The sums over the programs of a step. lines: its `timelines`, where they are known."""
    busy: dict[str, float] = defaultdict(float)
    stalls: dict[str, float] = defaultdict(float)
    busy[COMPUTATION] = 0.0
    for name, line in (timelines(plan) if lines is None else lines).items():
        times = plan.times(name)
        for table, found in ((busy, line.busy), (stalls, line.stalls)):
            for stream, seconds in found.items():
                if times:
                    table[stream] += seconds * times
    return StepSeconds(plan.seconds, dict(busy), dict(stalls))


def in_words(found: StepSeconds, device: Device) -> list[str]:
    """The predicted step; nothing where the device knows no links and the rank neither sends nor copies."""
    if not device.levels and not found.streams:
        return []
    low, high = (found.seconds * share for share in device.band)
    band = f" ({low:.3g} to {high:.3g})" if low < high else ""
    lines = [f"{'step, predicted':<34}{found.seconds:>12.3g} s  {band} on {device.name}"]
    for stream, seconds in found.busy.items() if found.streams else ():
        if stream == COMPUTATION:
            lines.append(f"  {stream:<32}{seconds:>12.3g} s")
        elif seconds:
            waited = found.stalls.get(stream, 0.0)
            hidden = seconds - waited if seconds - waited > ROUNDING * seconds else 0.0
            lines.append(f"  {stream:<32}{seconds:>12.3g} s   {waited:.3g} s of it waited for, {hidden:.3g} s hidden behind computation")
    return lines + [f"  {sentence}" for sentence in without_links(found, device)]


def without_links(found: StepSeconds, device: Device) -> list[str]:
    """A sentence for each kind of link that the step has a use for and the device file does not describe."""
    copies, collectives = ([s for s in found.streams if (s in _COPIES) == wanted] for wanted in (True, False))
    lines = []
    if copies and device.host_link is None:
        lines.append(f"the device file {device.name} has no host_link, so copies to and from the host take no time here (docs/devices.md)")
    if collectives and not device.levels:
        some = ", ".join(collectives)
        lines.append(
            f"the device file {device.name} has no levels, so collectives beside the computation ({some}) take no time here (docs/devices.md)"
        )
    return lines
