"""A deep step captured by its repetitions: a few short captures, from which the long one is stamped out, exactly as it would have been captured.

Two things must agree before a stamped graph is handed out: the short captures foretell a longer one to the last number (graph/stamp.py), and the logs
of the short forwards' calls foretell the log of the whole forward (capture/calls.py), which costs little. So a block that is special, a layer that is
frozen or shared, and a loop that does something else at step 1,000 are seen. If anything differs, the step is captured whole.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from packhorse.capture.calls import Calls, Unseen, calls_of, contents
from packhorse.capture.convert import convert
from packhorse.capture.questions import NO_QUESTIONS, Questions
from packhorse.capture.repeats import Run, cut, is_row_major, lengths, runs_of_blocks, shortened
from packhorse.capture.trace import trace
from packhorse.errors import UserError
from packhorse.graph.drop_clones import drop_clones
from packhorse.graph.ir import Graph
from packhorse.graph.loss_rows import loss_in_rows
from packhorse.graph.stamp import Unlike, learn, same_but_for_names, stamp

# Fewer repetitions are captured as they are: it would save little.
LEAST_BLOCKS = 12
LEAST_STEPS = 24
MOST_CAPTURED = 0.5

# With how many repetitions to begin. The first and last ones of a recurrent net are special, backward two of them.
_SHORTEST_BLOCKS = (2, 3)
_SHORTEST_STEPS = (4, 5)

# What an attempt may meet: a model that does not run when it is cut, or does otherwise. Then the step is captured whole, and that says what is wrong.
_FAILURES = (Unlike, Unseen, UserError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError, AssertionError)


@dataclass(frozen=True)
class Whole:
    """A step's graph as `convert` gives it, but for names of values and without copies that nothing can tell from their source, its loss worked
    through in rows; constants, questions and generators as in Captured."""

    graph: Graph
    constants: dict[str, torch.Tensor]
    questions: Questions
    generators: dict[str, torch.Generator]


def captured_whole(
    name: str, model: torch.nn.Module, batch: Any, loss: Callable | None, with_gradients: bool, compute: torch.dtype | None = None
) -> Whole:
    """The graph of a step, captured as it is. As `trace`; raises CaptureError."""
    traced = trace(model, batch, loss, with_gradients, compute)
    graph, constants = convert(name, traced)
    # before anything is stamped out: what holds for each repetition is found in a few of them
    return Whole(loss_in_rows(drop_clones(graph)), constants, traced.questions, traced.generators)


@dataclass(frozen=True)
class _Step:
    """What is captured: see `trace`."""

    model: torch.nn.Module
    batch: Any
    loss: Callable | None
    with_gradients: bool
    compute: torch.dtype | None

    def calls(self) -> Calls:
        return calls_of(self.model, self.batch, self.loss, self.with_gradients, self.compute)


@dataclass(frozen=True)
class _Family:
    """The step with any number of repetitions. counts: how many there really are, of each run. at(counts): the step with that many, while inside."""

    counts: tuple[int, ...]
    at: Callable[[tuple[int, ...]], AbstractContextManager[_Step]]
    shortest: tuple[int, ...]
    whole: Calls


def stamped(
    name: str,
    model: torch.nn.Module,
    batch: Any,
    loss: Callable | None,
    with_gradients: bool,
    compute: torch.dtype | None = None,
    least_blocks: int = LEAST_BLOCKS,
    least_steps: int = LEAST_STEPS,
    most_captured: float = MOST_CAPTURED,
) -> Whole | None:
    """The graph of a step with many repetitions, made from short captures. None if there are none, or if they are not all alike.

    name: of the graph. least_blocks, least_steps: how many repetitions are many. most_captured: what part of them the short captures may have
    together. The rest as in `trace`. Raises nothing of its own.
    """
    step = _Step(model, batch, loss, with_gradients, compute)
    try:
        for family in _families(step, least_blocks, least_steps):
            found = _grown(name, family, most_captured)
            if found is not None:
                return found
    except _FAILURES:
        pass
    return None


def _families(step: _Step, least_blocks: int, least_steps: int) -> Iterator[_Family]:
    runs = runs_of_blocks(step.model, least_blocks)
    times = lengths(step.batch, least_steps) if is_row_major(step.batch) else []
    if not runs and not times:
        return
    whole = step.calls()
    if 0 < len(runs) <= 8:
        yield _blocks(step, whole, runs)
        doubled = [replace(run, count=run.count // 2, period=2 * run.period) for run in runs if run.count >= 2 * max(_SHORTEST_BLOCKS)]
        if len(doubled) == len(runs):
            yield _blocks(step, whole, doubled)
    often = _most_often(whole.graph)
    for dim, size in times:
        if size <= often + 2 and whole.questions is NO_QUESTIONS:
            yield _times(step, whole, dim, size)


def _most_often(calls: Graph) -> int:
    """How often the same line of the same module makes the same call."""
    counts: dict[tuple[str, str, str], int] = {}
    for node in calls.nodes:
        key = node.op, node.module, node.source
        counts[key] = counts.get(key, 0) + 1
    return max(counts.values(), default=0)


def _blocks(step: _Step, whole: Calls, runs: list[Run]) -> _Family:
    @contextmanager
    def at(counts: tuple[int, ...]) -> Iterator[_Step]:
        with shortened(runs, counts):
            yield step

    return _Family(tuple(run.count for run in runs), at, _SHORTEST_BLOCKS, whole)


def _times(step: _Step, whole: Calls, dim: int, size: int) -> _Family:
    @contextmanager
    def at(counts: tuple[int, ...]) -> Iterator[_Step]:
        yield replace(step, batch=cut(step.batch, dim, size, counts[0]))

    return _Family((size,), at, _SHORTEST_STEPS, whole)


def _grown(name: str, family: _Family, most_captured: float) -> Whole | None:
    """The family's graph at its real size; None if it does not follow from shorter ones."""
    known: dict[tuple[int, ...], Whole] = {}

    def captured(counts: tuple[int, ...]) -> Whole:
        if counts not in known:
            with family.at(counts) as step:
                known[counts] = captured_whole(name, step.model, step.batch, step.loss, step.with_gradients, step.compute)
        return known[counts]

    for shortest in family.shortest:
        try:
            return _from(shortest, family, most_captured, captured)
        except _FAILURES:
            continue
    return None


def _from(shortest: int, family: _Family, most_captured: float, captured: Callable[[tuple[int, ...]], Whole]) -> Whole:
    """captured: how often each run repeats -> the step captured so. Raises one of _FAILURES if the whole does not follow."""
    least, *rest = _sizes(shortest, len(family.counts))
    if sum(map(sum, (least, *rest))) > most_captured * sum(family.counts):
        raise Unlike("the short captures would cost as much as the whole")
    extra = tuple(count - shortest for count in family.counts)
    # first the logs: they cost little
    logs = []
    for counts in (least, *rest):
        with family.at(counts) as step:
            logs.append(step.calls().graph)
    foretold = stamp(learn(logs[0], logs[1:-1], logs[-1], [{}] * len(logs)), extra).graph
    if not same_but_for_names(foretold, family.whole.graph, {}, {}):
        raise Unlike("the whole forward does not follow from short ones")
    short = [captured(counts) for counts in (least, *rest)]
    labels = [{target: contents(tensor) for target, tensor in one.constants.items()} for one in short]
    if any(label is None for mine in labels for label in mine.values()):
        raise Unseen("a constant without contents")
    graphs = [one.graph for one in short]
    made = stamp(learn(graphs[0], graphs[1:-1], graphs[-1], labels), extra)
    constants = {target: short[0].constants[model] for target, model in made.models.items() if model in short[0].constants}
    given = [(i.role, i.target, i.value.dtype, i.value.shape, i.value.strides) for i in made.graph.inputs if i.role in ("param", "buffer", "batch")]
    if given != [(i.role, i.target, i.value.dtype, i.value.shape, i.value.strides) for i in family.whole.graph.inputs]:
        raise Unlike("other inputs")
    return Whole(made.graph, constants, family.whole.questions, {})


def _sizes(shortest: int, num_runs: int) -> list[tuple[int, ...]]:
    """The captures that `learn` asks for: the shortest one, one with one repetition more for each run, and the one to check."""
    least = (shortest,) * num_runs
    return [least, *(tuple(shortest + (r == run) for r in range(num_runs)) for run in range(num_runs)), tuple(shortest + 2 for _ in range(num_runs))]
