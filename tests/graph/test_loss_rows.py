"""The fused gradient of cross entropy: where it applies, and that it keeps the bits of the two operators that it replaces."""

import pytest
import torch
import torch.nn.functional as F

from packhorse.capture.capture import capture
from packhorse.capture.convert import convert
from packhorse.capture.trace import trace
from packhorse.graph.loss_rows import FUSED, loss_in_rows
from packhorse.graph.operators import LOSS_CHUNK_BYTES, loss_rows
from packhorse.runtime.kernels import RECIPES

pytestmark = pytest.mark.cpu


class Head(torch.nn.Module):
    def __init__(self, loss):
        super().__init__()
        self.fc = torch.nn.Linear(6, 9)
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.fc(x), y)


def ops(loss, x, y):
    return [node.op for node in capture(Head(loss), (x, y), None).micro.nodes]


def test_it_applies_to_cross_entropy_over_rows_only():
    x, y = torch.randn(5, 6), torch.randint(0, 9, (5,))
    assert FUSED in ops(F.cross_entropy, x, y)
    assert FUSED in ops(lambda z, t: F.cross_entropy(z, t, ignore_index=2, weight=torch.ones(9), reduction="sum"), x, y)
    assert FUSED not in ops(lambda z, t: F.cross_entropy(z, t, reduction="none").sum(), x, y)
    assert FUSED not in ops(lambda z, t: F.mse_loss(z, z * 2), x, y)
    assert FUSED not in ops(lambda z, t: F.cross_entropy(z, t, label_smoothing=0.1), x, y)
    assert FUSED not in ops(lambda z, t: F.cross_entropy(z.view(5, 9, 1, 1), t.view(5, 1, 1)), x, y)


def test_the_pass_replaces_two_nodes_by_one_with_the_same_result():
    x, y = torch.randn(5, 6), torch.randint(0, 9, (5,))
    before, _ = convert("g", trace(Head(F.cross_entropy), (x, y), None, True))
    after = loss_in_rows(before)
    assert len(after.nodes) == len(before.nodes) - 1
    assert before.outputs == after.outputs


@pytest.mark.parametrize("rows,columns", [(1, 3), (700, 1000), (130, 4096), (3, LOSS_CHUNK_BYTES)])
@pytest.mark.parametrize("reduction", [1, 2])
def test_chunks_of_rows_keep_the_bits(rows, columns, reduction):
    torch.manual_seed(0)
    log_probs = torch.log_softmax(torch.randn(rows, columns), 1)
    target = torch.randint(0, columns, (rows,))
    target[0] = -100
    grad_output, total = torch.tensor(0.37), torch.tensor(float(max(rows - 1, 1)))
    grad = torch.ops.aten.nll_loss_backward(grad_output, log_probs, target, None, reduction, -100, total)
    wanted = torch.ops.aten._log_softmax_backward_data(grad, log_probs, 1, torch.float32)
    scratch = torch.empty(loss_rows(rows, 4 * columns) * 4 * columns, dtype=torch.uint8)
    RECIPES[FUSED]([log_probs], scratch, grad_output, log_probs, target, None, reduction, -100, total)
    assert torch.equal(log_probs, wanted)
