"""All tests: one thread (bits depend on how a sum is split), and the checkers run on every plan that any test makes, and on every few of the programs
that were laid out to find it."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("a busy machine", deadline=None)
hypothesis.settings.load_profile("a busy machine")
EVERY = 8
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "runtime"))
sys.path.insert(0, str(Path(__file__).parent / "recompute"))
sys.path.insert(0, str(Path(__file__).parent / "parallel"))
sys.path.insert(0, str(Path(__file__).parent / "optim"))


@pytest.fixture(autouse=True, scope="session")
def one_thread(request):
    """Of the whole session: fixtures of modules run steps too."""
    if all(item.get_closest_marker("pure") for item in request.session.items):
        return
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread_again(request):
    yield
    if not request.node.get_closest_marker("pure"):
        import torch

        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def checked(request, monkeypatch):
    """After each pass its checker: verify(graph), check_schedule, check_layout, check_program. Of programs that a planner only looks at, one of
    EVERY."""
    if request.node.get_closest_marker("pure") or request.node.get_closest_marker("unchecked"):
        return
    import packhorse.planning.choose as choose
    import packhorse.planning.plan as planning
    import packhorse.runtime.programs as programs
    import packhorse.step_plan as step_plan
    from packhorse.graph.liveness import check_schedule, lifespans
    from packhorse.graph.verify import verify
    from packhorse.memory.bounds import lower_bound
    from packhorse.memory.buffers import Buffer
    from packhorse.memory.check import check_layout
    from packhorse.planning.persistent import misfit
    from packhorse.program.check import check_program
    from packhorse.program.lower import lower

    original, original_plan = planning.plan_graph, step_plan.make_plan
    looked_at = itertools.count()

    def check(graph, persistent, options, planned):
        verify(graph)
        assert not misfit(graph, persistent)
        assert all(slot.offset % 64 == 0 for run in persistent.runs for slot in run.slots)
        if len(graph.nodes) < 2000:
            check_schedule(graph, lifespans(graph))
        if options.sketch:  # it has no offsets and is never run
            return
        buffers = [Buffer(s.name, s.lower, s.upper, s.size) for s in planned.placement.storages if s.space == "arena"]
        buffers += [buffer for buffer, _ in planned.lent]
        layout = replace(planned.layout, offsets=planned.layout.offsets | {buffer.name: offset for buffer, offset in planned.lent})
        check_layout(buffers, replace(layout, lower_bound=lower_bound(buffers, 64)))
        on_host = [Buffer(s.name, s.lower, s.upper, s.size) for s in planned.placement.storages if s.space == "host"]
        if on_host:
            check_layout(on_host, replace(planned.host, lower_bound=lower_bound(on_host, 64)))
        if options.share and not planned.lent:
            assert planned.layout.fragmentation == 0, f"{graph.name}: fragmentation {planned.layout.fragmentation}"
        check_program(lower(planned), {run.name: run.num_bytes for run in persistent.runs})

    def plan_and_check(graph, persistent, options):
        planned = original(graph, persistent, options)
        check(graph, persistent, options, planned)
        return planned

    def look_and_check_some(graph, persistent, options):
        planned = original(graph, persistent, options)
        if next(looked_at) % EVERY == 0:
            check(graph, persistent, options, planned)
        return planned

    def make_and_check(graphs, persistent, options, *rest, **more):
        plan = original_plan(graphs, persistent, options, *rest, **more)
        assert plan.least_overhead_seconds is None or plan.overhead_seconds >= plan.least_overhead_seconds - 1e-9
        for planned in plan.programs.values():
            check(planned.graph, persistent, options, planned)
        return plan

    monkeypatch.setattr(planning, "plan_graph", plan_and_check)
    monkeypatch.setattr(choose, "plan_graph", look_and_check_some)
    monkeypatch.setattr(step_plan, "make_plan", make_and_check)
    monkeypatch.setattr(programs, "plan_graph", plan_and_check)
