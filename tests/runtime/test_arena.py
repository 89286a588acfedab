"""Canary and poison: a program writes exactly up to its height, never over a live value, and a wrong offset is caught twice."""

from dataclasses import replace

import pytest
import torch

import packhorse as ph
from packhorse.errors import CheckError
from packhorse.memory.buffers import Buffer
from packhorse.memory.check import check_layout
from packhorse.program.check import check_program
from packhorse.program.lower import lower
from packhorse.runtime.arena import PATTERN, Arena
from zoo import MODELS, batch_for

pytestmark = pytest.mark.cpu


def compiled(name, **options):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    plan = ph.plan(model, batch_for(model), optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), clip_norm=1.0, **options)
    return ph.compile(model, plan), batch_for(model)


@pytest.mark.parametrize("name", MODELS)
def test_last_changed_byte_is_within_one_alignment_of_the_height(name):
    step, batch = compiled(name)
    height = step.plan.programs["first"].arena_bytes
    step.programs.arena.data.fill_(PATTERN)
    bound = next(b for key, b in step.programs.bound.items() if key[0] == "first")
    with torch.inference_mode():
        bound.batch.update(step._leaves(batch))
        for run in bound.steps:
            run()
    changed = torch.nonzero(step.programs.arena.data != PATTERN)
    assert height - 64 < int(changed[-1]) + 1 <= height


@pytest.mark.parametrize("name", MODELS)
def test_poisoned_freed_ranges_change_nothing(name):
    wanted, batch = compiled(name)
    torch.manual_seed(7)
    loss = wanted(batch)
    step, _ = compiled(name)
    torch.manual_seed(7)
    poisoned = 0
    for kind in ("first", "norm", "update"):
        if not any(k[0] == kind for k in step.programs.bound):
            continue
        key = next(k for k in step.programs.bound if k[0] == kind)
        bound, planned = step.programs.bound[key], step.programs.planned[key]
        storages = [s for s in planned.placement.storages if s.space == "arena"]
        offsets = planned.layout.offsets
        times = [i.time for i in bound.program.instructions]
        bound.batch.update(step._leaves(batch) if kind == "first" else {})
        with torch.no_grad():
            for index, run in enumerate(bound.steps):
                run()
                if index + 1 < len(times) and times[index + 1] == times[index]:
                    continue  # a copy of the same instant follows
                time = times[index + 1] if index + 1 < len(times) else len(planned.graph.nodes) + 1
                free = torch.ones(planned.arena_bytes, dtype=torch.bool)
                for s in storages:
                    if s.lower < time < s.upper or s.lower < time == s.upper - 1:
                        free[offsets[s.name] : offsets[s.name] + s.size] = False
                step.programs.arena.data[: planned.arena_bytes][free] = 0xFF  # NaN in every float type
                poisoned += int(free.sum())
    assert poisoned > 0
    assert torch.equal(step.metrics["loss"], loss)
    assert all(torch.equal(a, b) for a, b in zip(wanted.model.state_dict().values(), step.model.state_dict().values()))


def shifted(planned, name, by):
    return replace(planned, layout=replace(planned.layout, offsets={**planned.layout.offsets, name: planned.layout.offsets[name] + by}))


def test_a_buffer_above_the_height_fails_checker_and_canary():
    step, batch = compiled("mlp")
    planned = step.plan.programs["first"]
    buffers = [Buffer(s.name, s.lower, s.upper, s.size) for s in planned.placement.storages if s.space == "arena"]
    top = max(buffers, key=lambda b: planned.layout.offsets[b.name] + b.size)
    wrong = shifted(planned, top.name, 64)
    with pytest.raises(CheckError):
        check_layout(buffers, wrong.layout)
    with pytest.raises(CheckError, match="covers"):
        check_program(lower(wrong), {run.name: run.num_bytes for run in step.programs.persistent.runs})
    with pytest.raises(CheckError, match="above the arena's height"):
        step.programs.bind(wrong).run(step._leaves(batch))


def test_a_buffer_over_a_live_one_fails_both_checkers():
    step, _ = compiled("mlp")
    planned = step.plan.programs["first"]
    storages = [s for s in planned.placement.storages if s.space == "arena" and s.size >= 128]
    offsets = planned.layout.offsets
    caught = 0
    for a in storages:
        for b in storages:
            if a.name != b.name and a.lower < b.lower < a.upper - 1 and len(a.roots) == 1:
                wrong = shifted(planned, b.name, offsets[a.name] - offsets[b.name])
                buffers = [Buffer(s.name, s.lower, s.upper, s.size) for s in planned.placement.storages if s.space == "arena"]
                with pytest.raises(CheckError):
                    check_layout(buffers, wrong.layout)
                with pytest.raises(CheckError):
                    check_program(lower(wrong), {run.name: run.num_bytes for run in step.programs.persistent.runs})
                caught += 1
    assert caught > 3


def test_guard_bytes_are_watched():
    arena = Arena(1000, torch.device("cpu"))
    assert arena.data.data_ptr() % 64 == 0
    arena.fill(1024, everything=True)
    assert arena.high_water(1024, everything=True) is None
    arena.data[100] = 1
    assert arena.high_water(1024, everything=True) == 101
    arena.data[1024] = 1
    with pytest.raises(CheckError):
        arena.high_water(1024, everything=True)


def test_switches_show_what_sharing_and_in_place_save():
    sizes = {}
    for share in (True, False):
        for in_place in (True, False):
            step, batch = compiled("gpt", share=share, in_place=in_place)
            torch.manual_seed(3)
            sizes[share, in_place] = step.plan.arena_bytes, step(batch).item()
            assert step.ledger().measured_peak_bytes == step.plan.peak_bytes
    assert len({loss for _, loss in sizes.values()}) == 1
    assert sizes[True, True][0] < sizes[True, False][0] < sizes[False, False][0]
    assert sizes[True, True][0] < sizes[False, True][0] < sizes[False, False][0]
