"""packhorse against plain PyTorch with the same optimizer object's settings: every loss, gradient, norm, parameter and buffer, bit for bit."""

import copy

import pytest
import torch

import packhorse as ph
from zoo import MODELS, Outputs, batch_for, gpt

pytestmark = pytest.mark.cpu

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True),
    "adamw amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True, betas=(0.8, 0.95), eps=1e-6),
    "adamw amsgrad fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True, fused=True),
    "adamw maximize": lambda ps: torch.optim.AdamW(ps, lr=1e-4, maximize=True),
    "adam decay": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1),
    "adam decay fused": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd nesterov fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True),
    "sgd foreach maximize": lambda ps: torch.optim.SGD(ps, lr=1e-4, momentum=0.9, foreach=True, maximize=True),
}


def plain_step(model, optimizer, micros, clip, loss_fn=None):
    """One step of the loop that people write. Returns loss, gradients before clipping, and the norm."""
    optimizer.zero_grad()
    total = 0.0
    for micro in micros:
        out = model(**micro)
        loss = (
            (out if loss_fn is None else loss_fn(out, micro)) / len(micros) if len(micros) > 1 else (out if loss_fn is None else loss_fn(out, micro))
        )
        loss.backward()
        total = total + loss.detach()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    norm = None if clip is None else torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return total, grads, norm


def assert_equal_training(make, optimizer, steps, micros=1, clip=None, seed=5):
    torch.manual_seed(seed)
    plain = make().train()
    mine = copy.deepcopy(plain)
    theirs, ours = OPTIMIZERS[optimizer](plain.parameters()), OPTIMIZERS[optimizer](mine.parameters())
    batches = [[batch_for(plain, seed=100 * s + m) for m in range(micros)] for s in range(steps)]
    torch.manual_seed(seed + 1)
    wanted = [plain_step(plain, theirs, batch, clip) for batch in batches]
    plan = ph.plan(mine, batches[0] if micros > 1 else batches[0][0], optimizer=ours, clip_norm=clip, num_micro_batches=micros)
    step = ph.compile(mine, plan)
    torch.manual_seed(seed + 1)
    for index, (batch, (loss, grads, norm)) in enumerate(zip(batches, wanted)):
        got = step(batch if micros > 1 else batch[0])
        assert torch.equal(got, loss), f"loss of step {index + 1}: {got.item()} != {loss.item()}"
        seen = step.grads()
        assert seen.keys() == grads.keys()
        assert all(torch.equal(seen[n], grads[n]) for n in grads), f"step {index + 1}: {[n for n in grads if not torch.equal(seen[n], grads[n])]}"
        if clip is not None:
            assert step.last.grad_norm == norm.item()
            assert step.last.clipped_norm == pytest.approx(min(norm.item(), clip), rel=1e-4)
    for (name, a), b in zip(plain.state_dict().items(), mine.state_dict().values()):
        assert torch.equal(a, b), name
    ledger = step.ledger()
    assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes == plan.peak_bytes
    return step


@pytest.mark.parametrize("micros,clip", [(1, None), (1, 0.5), (3, None), (3, 0.5)])
@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_equal_eager(model, micros, clip):
    assert_equal_training(MODELS[model], "adamw", steps=20, micros=micros, clip=clip)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_every_optimizer_flag_is_honoured(optimizer, clip):
    assert_equal_training(MODELS["mlp"], optimizer, steps=6, clip=clip)


def test_two_threads_equal_eager():
    torch.set_num_threads(2)
    assert_equal_training(gpt, "adamw fused", steps=4, clip=1.0)


def test_float64_model_keeps_its_dtype():
    def make():
        return gpt().double()

    step = assert_equal_training(make, "adamw", steps=4, clip=1.0)
    assert step(batch_for(gpt())).dtype == torch.float64


def test_parameter_groups_and_changing_learning_rate():
    torch.manual_seed(0)
    plain = gpt().train()
    mine = copy.deepcopy(plain)

    def groups(model):
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 5e-3}], lr=1e-2)

    theirs, ours = groups(plain), groups(mine)
    their_schedule = torch.optim.lr_scheduler.StepLR(theirs, step_size=2, gamma=0.3)
    batch = batch_for(plain)
    step = ph.compile(
        mine, ph.plan(mine, batch, optimizer=ours, clip_norm=1.0), scheduler=torch.optim.lr_scheduler.StepLR(ours, step_size=2, gamma=0.3)
    )
    torch.manual_seed(1)
    for _ in range(6):
        plain_step(plain, theirs, [batch], 1.0)
        their_schedule.step()
    torch.manual_seed(1)
    for _ in range(6):
        step(batch)
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mine.parameters()))


def test_loss_function_and_output_object():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(13, 7)

        def forward(self, x, y):
            logits = self.fc(x)
            return Outputs(torch.nn.functional.cross_entropy(logits, y), logits)

    torch.manual_seed(0)
    plain = Net()
    batch = batch_for(MODELS["mlp"]())
    for loss in (None, lambda out, given: torch.nn.functional.cross_entropy(out.logits, given["y"]) * 2):
        mine = copy.deepcopy(plain)
        step = ph.compile(mine, ph.plan(mine, batch, optimizer=torch.optim.SGD(mine.parameters(), lr=0.1), loss=loss))
        want = plain(**batch).loss if loss is None else loss(plain(**batch), batch)
        assert torch.equal(step(batch), want.detach())
        plain.zero_grad()
        want.backward()
        assert torch.equal(step.grads()["fc.weight"], plain.fc.weight.grad)


def test_training_goes_on_from_an_optimizer_that_has_state():
    torch.manual_seed(0)
    plain = gpt().train()
    theirs = OPTIMIZERS["adamw"](plain.parameters())
    batch = batch_for(plain)
    for _ in range(3):
        plain_step(plain, theirs, [batch], None)
    mine = copy.deepcopy(plain)
    ours = OPTIMIZERS["adamw"](mine.parameters())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    torch.manual_seed(1)
    for _ in range(3):
        plain_step(plain, theirs, [batch], None)
    step = ph.compile(mine, ph.plan(mine, batch, optimizer=ours))
    torch.manual_seed(1)
    for _ in range(3):
        step(batch)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mine.parameters()))
