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
    if code is wrong_shape:
        assert message.endswith("and mend it there; if it works there, it cannot be captured as it is")
    else:
        assert "values inside a tensor" in message and "torch.where" in message and "not of floats or activations" in message


def unfinished(h):
    raise NotImplementedError("later")


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, ValueError])
def test_only_what_torch_cannot_trace_is_to_be_replaced(error):
    def code(h):
        raise error("no")

    with pytest.raises(CaptureError, match="and mend it there") as caught:
        capture(Outer(code), torch.randn(2, 4), None)
    assert "replace this line" not in str(caught.value) and f"the model raised {error.__name__}" in str(caught.value)
    with pytest.raises(CaptureError, match="if it works, replace this line by operators"):
        capture(Outer(unfinished), torch.randn(2, 4), None)


def test_no_scalar_loss():
    with pytest.raises(CaptureError, match=r"float32 of shape \[2, 4\]"):
        capture(nn.Linear(4, 4), torch.randn(2, 4), None)
    for loss, seen in [(lambda out, batch: "loss", "str"), (lambda out, batch: out[:, :3], "float32 of shape [2, 3]")]:
        with pytest.raises(CaptureError) as caught:
            capture(nn.Linear(4, 4), torch.randn(2, 4), loss)
        assert f"the loss function returned {seen}," in str(caught.value) and "pass" not in str(caught.value)


class Outputs(nn.Module):
    """Gives a loss only with labels, as models of Hugging Face do."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, pixel_values, labels=None):
        return {"logits": self.fc(pixel_values)}


def test_a_batch_without_labels():
    with pytest.raises(CaptureError, match="seen dict; the batch has no labels, and many models give a loss only with them"):
        capture(Outputs(), {"pixel_values": torch.randn(2, 4)}, None)
    for batch in ({"pixel_values": torch.randn(2, 4), "labels": torch.ones(2)}, (torch.randn(2, 4),)):
        with pytest.raises(CaptureError) as caught:
            capture(Outputs(), batch, None)
        assert "no labels" not in str(caught.value)


def test_a_loss_function_that_fails_is_told_from_the_model():
    def loss(out, batch):
        return (out - batch.targets).mean()

    line = inspect.getsourcelines(loss)[1] + 1
    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(4, 4), torch.randn(2, 4), loss)
    message = str(caught.value)
    assert f"the loss function raised AttributeError at test_refusals.py:{line}: " in message and "it is called as loss(output, batch)" in message
    assert "the model raised" not in message
    with pytest.raises(CaptureError, match=r"in the loss function, at .* the code looks at the values"):
        capture(nn.Linear(4, 4), torch.randn(2, 4), lambda out, batch: out.sum() * out.max().item())
    with pytest.raises(CaptureError, match="the loss function raised TypeError: "):  # no line of the caller's own
        capture(nn.Linear(4, 4), torch.randn(2, 4), nn.CosineEmbeddingLoss())
    with pytest.raises(CaptureError, match="the model raised TypeError"):
        capture(Outer(lambda h: h + "1"), torch.randn(2, 4), loss)


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
