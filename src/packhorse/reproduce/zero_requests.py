"""A plan -> the allocations that the same step asks of an allocator where every tensor comes when it is made and goes after its last use."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from packhorse.memory.caching import Request
from packhorse.planning.persistent import Persistent, Run
from packhorse.planning.plan import GraphPlan, Plan

LATE = ("gradients", "optimizer states")
Sized = tuple[str, int]  # name of a tensor, its bytes


def requests_of(steps: Sequence[Plan], late: bool) -> tuple[Request, ...]:
    """The requests of training steps, one after another; steps[k] is the plan of the k-th. All are of one model on one rank.

    First, for good, one allocation for each tensor of the persistent runs. Then, program by program as a step runs them, each storage of the
    placement when it is made, until after its last use. What one result takes over from another in the plan is one allocation here too, so that an
    allocator is asked for no more than the arena holds. What adopting kernels allocate is asked for as well.
    late: a gradient is allocated where the backward pass first writes it and freed at the end of the step (zero_grad as it is by default), and
    optimizer states are allocated at the first update (as torch.optim does). Else both are there from the start.
    """
    clock = count()
    persistent = steps[0].persistent
    requests = list(_allocated((t for run in persistent.runs if not (late and run.kind in LATE) for t in _tensors(run)), clock))
    for number, plan in enumerate(steps):
        gradients: dict[str, int] = {}  # of this step, so far
        for name, planned in plan.programs.items():
            if late and number == 0 and name == "update":
                requests += _allocated((t for run in persistent.runs if run.kind == "optimizer states" for t in _tensors(run)), clock)
            for repetition in range(plan.times(name)):
                made = _gradients(planned, persistent) if late else {}
                new = {time: [(grad, size) for grad, size in found if grad not in gradients] for time, found in made.items()}
                gradients |= {grad: size for found in new.values() for grad, size in found}
                requests += _of_program(planned, new, f"step {number}, {name} {repetition}: ", clock)
        requests += _freed(gradients.items(), clock)
    return tuple(requests)


def _allocated(tensors: Iterable[Sized], clock: Iterator[int]) -> Iterator[Request]:
    return (Request(next(clock), False, name, size) for name, size in tensors)


def _freed(tensors: Iterable[Sized], clock: Iterator[int]) -> Iterator[Request]:
    return (Request(next(clock), True, name, size) for name, size in tensors)


def _tensors(run: Run) -> list[Sized]:
    return [(f"{run.name} {slot.target}", slot.value.extent_bytes) for slot in run.slots]


def _gradients(planned: GraphPlan, persistent: Persistent) -> dict[int, list[Sized]]:
    """Time -> the gradients that the program first touches then. A shard that is written as a whole makes all tensors in it."""
    maker = {value.name: time for time, node in enumerate(planned.graph.nodes) for value in node.outputs if value is not None}
    touched = [(home, maker.get(root, 0)) for root, home in planned.placement.homes.items()]
    touched += [(copy.home, copy.time) for copy in planned.placement.copies]
    first: dict[str, dict[int, int]] = {}  # run -> offset -> time
    for home, time in touched:
        if home.space == "persistent":
            times = first.setdefault(home.key, {})
            times[home.offset] = min(time, times.get(home.offset, time))
    found: dict[int, list[Sized]] = {}
    for run in persistent.runs:
        if run.kind == "gradients" and run.name in first:
            earliest = min(first[run.name].values())
            for slot, tensor in zip(run.slots, _tensors(run), strict=True):
                found.setdefault(first[run.name].get(slot.offset, earliest), []).append(tensor)
    return found


def _of_program(planned: GraphPlan, gradients: dict[int, list[Sized]], label: str, clock: Iterator[int]) -> Iterator[Request]:
    """One run of a program: at each time first the frees of what ended before it, then what begins."""
    begins: dict[int, list[Sized]] = {}
    ends: dict[int, list[Sized]] = {}
    for storage in planned.placement.storages:
        begins.setdefault(storage.lower, []).append((label + storage.name, storage.size))
        ends.setdefault(storage.upper, []).append((label + storage.name, storage.size))
    for time in sorted({*begins, *ends, *gradients}):
        yield from _freed(ends.get(time, ()), clock)
        yield from _allocated((*gradients.get(time, ()), *begins.get(time, ())), clock)
