"""What cannot be captured says which module, which line of which file, and what to change."""

import inspect

import pytest
import torch
import torch.nn as nn

from packhorse.capture.capture import capture
from packhorse.errors import CaptureError

pytestmark = pytest.mark.cpu


class Inner(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.code = code

    def forward(self, x):
        return self.code(self.fc(x))


class Outer(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.inner = Inner(code)

    def forward(self, x):
        return self.inner(x).sum()


def item(h):
    return h * h.max().item()


def branch(h):
    return h if h.sum() > 0 else -h


def nonzero(h):
    return h[h.abs() > 0.5]


def wrong_shape(h):
    return h @ torch.ones(5, 5)


@pytest.mark.parametrize("code", [item, branch, nonzero, wrong_shape])
def test_the_line_and_the_module_are_named(code):
    line = inspect.getsourcelines(code)[1] + 1
    with pytest.raises(CaptureError) as caught:
        capture(Outer(code), torch.randn(2, 4), None)
    message = str(caught.value)
    assert f"test_refusals.py:{line}" in message and "'inner'" in message
    assert "\n" not in message
    if code is not wrong_shape:
        assert "values inside a tensor" in message and "torch.where" in message


def test_no_scalar_loss():
    with pytest.raises(CaptureError, match=r"float32 of shape \[2, 4\]"):
        capture(nn.Linear(4, 4), torch.randn(2, 4), None)
    with pytest.raises(CaptureError, match="no scalar loss"):
        capture(nn.Linear(4, 4), torch.randn(2, 4), lambda out, batch: "loss")


def test_a_model_that_writes_into_its_batch():
    with pytest.raises(CaptureError, match="writes into its batch"):

        class Writes(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(4, 4)

            def forward(self, x):
                x.mul_(2)
                return self.fc(x).sum()

        capture(Writes(), torch.randn(2, 4), None)


def test_hooks_are_gone_after_a_failure():
    model = Outer(item)
    with pytest.raises(CaptureError):
        capture(model, torch.randn(2, 4), None)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
