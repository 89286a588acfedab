"""The whole pipeline on a two-layer model: capture -> graph -> plan -> program -> run, each type looked at once."""

import copy

import pytest
import torch
from torch import nn

import packhorse as ph
from packhorse.capture.capture import capture
from packhorse.graph.text import parse_graph, print_graph
from packhorse.graph.verify import verify
from packhorse.program.check import check_program
from packhorse.program.explain import explain
from packhorse.program.lower import lower

pytestmark = pytest.mark.cpu


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.b(torch.relu(self.a(x))), y)


def test_tiny():
    torch.manual_seed(0)
    model, batch = Tiny(), {"x": torch.randn(3, 8), "y": torch.tensor([0, 3, 1])}
    plain = copy.deepcopy(model)

    captured = capture(model, batch, None)
    verify(captured.first)
    assert parse_graph(print_graph(captured.first)) == captured.first
    ops = [n.op.split(".")[1] for n in captured.first.nodes if not n.is_view]
    assert ops[:5] == ["addmm", "relu", "addmm", "_log_softmax", "nll_loss_forward"]

    plan = ph.plan(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), recompute="none")
    num = 8 * 16 + 16 + 16 * 4 + 4
    # parameters and gradients, each tensor on a multiple of 64 bytes (the bias of 4 numbers wastes 48), the constant and the loss 64 each
    assert plan.persistent_bytes == 2 * (4 * num + 48) + 64 + 64
    assert plan.peak_bytes == plan.persistent_bytes + plan.arena_bytes + plan.external_bytes
    # 2 flops a multiply-add: two products forward, and for each the weight's gradient, and the input's where it is needed
    assert plan.flops == 2 * 3 * (8 * 16 * 2 + 16 * 4 * 3)

    program = lower(plan.programs["first"])
    check_program(program, {run.name: run.num_bytes for run in plan.persistent.runs})
    for stage in ("graph", "plan", "program"):
        assert "relu" in explain(plan, stage)

    step = ph.compile(model, plan)
    loss = step(batch)
    wanted = plain(**batch)
    wanted.backward()
    assert torch.equal(loss, wanted.detach())
    assert all(torch.equal(step.grads()[n], p.grad) for n, p in plain.named_parameters())
    assert all(torch.equal(p - 0.5 * p.grad, model.get_parameter(n)) for n, p in plain.named_parameters())
    assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes == plan.peak_bytes
