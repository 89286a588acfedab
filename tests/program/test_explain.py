"""Collectives in the program as a reader of ZeRO's section 5 expects them."""

import re

import pytest
import torch

import packhorse as ph
from packhorse.program.explain import explain

pytestmark = pytest.mark.cpu


def lines(stage, micros=1):
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(5)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.zeros(4, 8)] * micros
    plan = ph.plan(
        model,
        batches if micros > 1 else batches[0],
        optimizer=optimizer,
        loss=lambda output, batch: output.square().mean(),
        mesh=ph.Mesh(dp=2),
        rank=0,
        zero_stage=stage,
        num_micro_batches=micros,
    )
    return plan, explain(plan, "program").splitlines()


def test_stage_3_gathers_each_block_before_its_use_in_both_directions():
    _, shown = lines(3)
    starts = [re.search(r"start  gather \S+\.(\d)( 2)?:", line) for line in shown]
    order = [(int(found[1]), found[2] is not None) for found in starts if found]
    forward, backward = [block for block, again in order if not again], [block for block, again in order if again]
    assert forward == [0, 1, 2, 3, 4]
    assert backward == [2, 1]  # 4 and 3 are still there when the backward pass begins, and nothing before 0 wants a gradient through it


def test_each_start_has_its_wait_behind_it():
    for stage in range(4):
        _, shown = lines(stage, micros=2)
        for program in "\n".join(shown).split("\nprogram "):
            started = {}
            for number, line in enumerate(program.splitlines()):
                if found := re.match(r"\s*\d+  start  (.+?): sends \d+ bytes", line):
                    assert found[1] not in started
                    started[found[1]] = number
                elif found := re.match(r"\s*\d+  wait   (.+?)  #", line):
                    assert started.pop(found[1]) < number
            assert not started


class Waves(torch.nn.Module):
    """44 sines, each of which saves its argument, and the square that saves its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        x = x * self.scale
        for _ in range(44):
            x = torch.sin(x)
        return x


@pytest.fixture(scope="module")
def offloaded():
    model = Waves()
    options = {"residency": "offload", "host_budget": "1GiB", "loss": lambda output, batch: output.square().mean()}
    return ph.plan(model, torch.zeros(4, 8), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_copies_are_shown_as_collectives_are_with_their_bytes(offloaded):
    shown = explain(offloaded, "program")
    for way in ("to", "from"):
        started = re.findall(rf"\n +(\d+)  start  {way} host (\S+): copies (\d+) bytes  (\S+) <- packhorse.{way}_host", shown)
        waited = {name: int(time) for time, name in re.findall(rf"\n +(\d+)  wait   {way} host (\S+)  #", shown)}
        assert [int(size) for _, _, size, _ in started] == [4 * 8 * 4] * 45
        assert {name for _, name, _, _ in started} == set(waited) and all(int(time) < waited[name] for time, name, _, _ in started)
        assert all(("@[host+" if way == "to" else "@[arena+") in where for _, _, _, where in started)


def test_the_plan_shows_where_saved_values_wait_and_sums_the_rest(offloaded):
    before, _, shown = explain(offloaded, "plan").partition("where saved values wait\n")
    table = shown.split("\nprogram ")[0].splitlines()
    assert len(table) == 1 + 40 + 1
    assert table[1].split()[:6] == ["128", "0", "128", "on", "the", "host"] and "test_explain.py" in table[1]
    assert " ".join(table[-1].split()) == "640 0 640 on the host 5 smaller ones"
    assert "packhorse.to_host" not in before


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2)])
def test_what_is_shown_to_be_sent_is_what_zero_says(stage, times):
    """2 Psi (N - 1) / N without gathers in between; the losses of the two ranks and the greeting besides."""
    plan, shown = lines(stage)
    psi = 5 * 4 * (8 * 8 + 8)
    sent = sum(int(number) for number in re.findall(r": sends (\d+) bytes", "\n".join(shown)))
    padding = 5 * 4 * 2 * 16  # of five weights and biases to 64 bytes, at most
    assert times * psi // 2 <= sent - 4 <= times * (psi + padding) // 2
    assert plan.comm_bytes == sent + 16
