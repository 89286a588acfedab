"""What went wrong once, here or elsewhere: each trap with plain PyTorch's own result beside it."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import packhorse as ph
from packhorse.errors import CaptureError, UserError
from zoo import batch_for, gpt

pytestmark = pytest.mark.cpu


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def compiled(model, batch, **options):
    return ph.compile(model, ph.plan(model, batch, optimizer=sgd(model), **options))


def assert_like_eager(model, batches, steps=3, **options):
    """Three steps; one micro-batch, or a list of them, a step."""
    plain, micros = copy.deepcopy(model), batches if isinstance(batches, list) else [batches]
    theirs = sgd(plain)
    step = compiled(model, batches, num_micro_batches=len(micros), **options)
    for k in range(steps):
        torch.manual_seed(k)
        theirs.zero_grad()
        total = 0.0
        for micro in micros:
            loss = plain(**micro) / len(micros) if len(micros) > 1 else plain(**micro)
            loss.backward()
            total = total + loss.detach()
        theirs.step()
        torch.manual_seed(k)
        assert torch.equal(step(batches), total)
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))
    assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes
    return step


class Net(nn.Module):
    def __init__(self, code, **parts):
        super().__init__()
        self.fc, self.code = nn.Linear(16, 16), code
        for name, part in parts.items():
            self.register_parameter(name, part) if isinstance(part, nn.Parameter) else setattr(self, name, part)

    def forward(self, x, **more):
        return self.code(self, self.fc(x), **more)


def x(rows=4):
    torch.manual_seed(7)
    return {"x": torch.randn(rows, 16)}


def test_channels_last_pooling_has_gradients():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.pool, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.pool(F.relu(self.norm(self.conv(x)))).flatten(1)).square().mean()

    torch.manual_seed(0)
    model = Vision().to(memory_format=torch.channels_last)
    batch = {"x": torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)}
    step = assert_like_eager(model, batch)
    assert step.grads()["conv.weight"].norm() > 0


def test_as_strided_counts_from_the_value_itself():
    assert_like_eager(Net(lambda net, h: h.as_strided((3, 4), (16, 1), 2).square().sum()), x())


def test_conjugates_are_values():
    turn = torch.polar(torch.ones(4, 8), torch.arange(32.0).view(4, 8))

    def rotary(net, h):
        return (
            torch.view_as_real(torch.view_as_complex(h.view(4, 8, 2)) * turn).square().sum()
            + torch.view_as_complex(h.view(4, 8, 2)).conj().imag.sum()
        )

    assert_like_eager(Net(rotary), x())


def test_a_plan_holds_for_the_modes_that_it_was_made_in():
    model = gpt(dropout=0.5).eval()
    plain, batch = copy.deepcopy(model).train(), batch_for(model)
    plan = ph.plan(model, batch, optimizer=sgd(model))
    model.train()
    step = ph.compile(model, plan)
    torch.manual_seed(1)
    wanted = plain(**batch).item()
    torch.manual_seed(1)
    assert step(batch).item() == wanted


@pytest.mark.parametrize("name", ["loss_before", "loss_share", "rng0", "seed", "grad_norm", "mean"])
def test_a_parameter_may_have_any_name(name):
    model = Net(lambda net, h: (F.dropout(h, 0.1) * getattr(net, name)).square().mean(), **{name: nn.Parameter(torch.ones(16))})
    assert_like_eager(model, [x(), x(3)], clip_norm=None)


def test_batch_leaves_of_the_same_written_name_are_told_apart():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, **batch):
            return (self.fc(batch["x"]["y"]) + 3 * batch["x.y"]).square().mean()

    batch = {"x": {"y": torch.randn(4, 16)}, "x.y": torch.randn(4, 16)}
    assert_like_eager(Two(), batch)


def test_keyword_order_does_not_matter_but_types_of_numbers_do():
    def code(net, h, y, flag):
        return (h.sum() if flag is True else h.square().sum()) * y.sum()

    model = Net(code)
    batch = {**x(), "y": torch.ones(2), "flag": True}
    plain, step = copy.deepcopy(model), compiled(model, batch)
    one = step({"flag": True, "y": batch["y"], "x": batch["x"]})
    assert torch.equal(one, plain(**batch).detach())
    plain.load_state_dict(step.state_dict())
    with pytest.raises(UserError, match="structure"):
        step({**batch, "flag": 1})


def test_a_bfloat16_embedding():
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 8), nn.Linear(8, 5)

        def forward(self, x):
            return F.cross_entropy(self.out(F.dropout(self.embed(x), 0.2)).flatten(0, 1), x.flatten())

    torch.manual_seed(0)
    assert_like_eager(Tokens().bfloat16(), {"x": torch.randint(0, 5, (6, 50))})


def test_hooks_and_shared_memory_are_refused():
    model = Net(lambda net, h: h.sum())
    handle = model.fc.weight.register_hook(lambda g: g * 2)
    with pytest.raises(UserError, match=r"'fc.weight' has a gradient hook"):
        ph.plan(model, x(), optimizer=sgd(model))
    handle.remove()
    optimizer = sgd(model)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UserError, match="step hooks"):
        ph.plan(model, x(), optimizer=optimizer)
    other = nn.Linear(16, 16)
    other.weight.data = model.fc.weight.data
    model.other = other
    with pytest.raises(UserError, match="share memory"):
        ph.plan(model, x(), optimizer=sgd(model))


def test_evaluation_changes_nothing_even_if_the_forward_does():
    def code(net, h):
        net.seen += 1
        return F.batch_norm(h + torch.randn_like(h), net.mean, net.var, training=True).square().mean()

    model = Net(code)
    for name in ("seen", "mean", "var"):
        model.register_buffer(name, torch.ones(16))
    step = compiled(model, x())
    step(x())
    other = x(3)
    before, state = step.state_dict(), torch.get_rng_state()
    step.evaluate(other)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[n], t) for n, t in step.state_dict().items())


def test_a_shape_that_is_looked_at_takes_no_memory():
    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 32, 3), nn.Linear(32 * 9, 2)

        def forward(self, x):
            return self.fc(F.adaptive_avg_pool2d(self.conv(x), 3).flatten(1)).sum()

    model = Pool()
    plan = ph.plan(model, {"x": torch.randn(2, 3, 64, 64)}, optimizer=sgd(model))
    assert plan.arena_bytes < 50_000 < plan.external_bytes
    assert_like_eager(model, {"x": torch.randn(2, 3, 64, 64)})


def test_micro_batches_of_several_sizes_are_planned_for_the_largest():
    model = Net(lambda net, h: h.square().mean())
    batches = [x(4), x(400), x(40)]
    plan = ph.plan(model, batches, optimizer=sgd(model), num_micro_batches=3, budget="100%")
    step = ph.compile(model, plan)
    step(batches)
    assert step.ledger().measured_peak_bytes == plan.peak_bytes == step.ledger().predicted_peak_bytes
    assert_like_eager(Net(lambda net, h: h.square().mean()), batches)


def test_a_larger_batch_moves_the_arena_of_all():
    step = compiled(Net(lambda net, h: h.exp().square().mean()), [x(2), x(3)], num_micro_batches=2)
    step([x(2), x(500)])
    assert len({id(bound.arena) for bound in step.programs.bound.values()}) == 1
    assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes


def test_the_optimizers_own_state_dict_is_the_live_one():
    model = gpt()
    plain, batch = copy.deepcopy(model), batch_for(model)
    theirs, ours = torch.optim.AdamW(plain.parameters()), torch.optim.AdamW(model.parameters())
    step = ph.compile(model, ph.plan(model, batch, optimizer=ours))
    for _ in range(2):
        torch.manual_seed(0)
        theirs.zero_grad()
        plain(**batch).backward()
        theirs.step()
        torch.manual_seed(0)
        step(batch)
    wanted, seen = theirs.state_dict()["state"], ours.state_dict()["state"]
    assert wanted.keys() == seen.keys()
    assert all(torch.equal(wanted[k][n], seen[k][n]) for k in wanted for n in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(o, 10)], milestones=[2]
        ),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    ],
    ids=["sequential", "multistep", "lambda", "onecycle"],
)
def test_schedulers_resume(tmp_path, schedule):
    def make():
        torch.manual_seed(0)
        model = Net(lambda net, h: h.square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return ph.compile(model, ph.plan(model, x(), optimizer=optimizer), scheduler=schedule(optimizer)), optimizer

    step, optimizer = make()
    for _ in range(3):
        step(x())
    ph.save(tmp_path / "step-3", step)
    wanted = [(step(x()).item(), optimizer.param_groups[0]["lr"]) for _ in range(4)]
    step, optimizer = make()
    ph.load(tmp_path / "step-3", step)
    assert [(step(x()).item(), optimizer.param_groups[0]["lr"]) for _ in range(4)] == wanted


def test_a_failing_kernel_names_module_and_line():
    step = compiled(gpt(), batch_for(gpt()))
    batch = batch_for(gpt())
    batch["ids"][1, 2] = 61
    before = step.state_dict()
    with pytest.raises(UserError, match=r"embedding.* failed in module 'tokens' at gpt.py"):
        step(batch)
    assert all(torch.equal(before[n], t) for n, t in step.state_dict().items())
    assert torch.isfinite(step(batch_for(gpt())))


def test_dtypes_that_do_not_go_together_are_named():
    """The fake tensors of a capture let a matrix product of two dtypes pass; plain PyTorch refuses it as the kernel does."""
    model = nn.Sequential(nn.Linear(16, 1), nn.Flatten(0))
    batch = x()["x"].double()
    with pytest.raises(RuntimeError, match="dtype"):
        model(batch)
    with pytest.raises(UserError, match=r"dtypes of batch and parameters do not go together \(batch: .*float64\)") as caught:
        compiled(model, batch, loss=lambda out, batch: out.mean())(batch)
    assert "outside its range" not in str(caught.value)


def test_small_mistakes_are_one_paragraph():
    model = Net(lambda net, h: h.sum())
    for code, text in [
        (lambda net, h: h.detach().sum(), "no parameter gets a gradient"),
        (lambda net, h: torch.linalg.inv(h.view(4, 4, 4)).sum(), "no ordinary tensor operator"),
    ]:
        bad = Net(code)
        with pytest.raises(CaptureError, match=text):
            ph.plan(bad, x(), optimizer=sgd(bad), clip_norm=1.0)
    plan = ph.plan(model, x(), optimizer=sgd(model))
    model.register_buffer("late", torch.zeros(2))
    with pytest.raises(UserError, match="added"):
        ph.compile(model, plan)
    del model.late
    with pytest.raises(UserError, match="ReduceLROnPlateau"):
        ph.compile(model, plan, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(plan.job.optimizer))


def test_no_rows_and_inference_mode():
    step = compiled(gpt(), batch_for(gpt()))
    with torch.inference_mode():
        assert torch.isfinite(step(batch_for(gpt(), size=2)))
    # the mean over no tokens is NaN in plain PyTorch too
    with pytest.raises(UserError, match="loss is nan"):
        step({k: v[:0] for k, v in batch_for(gpt()).items()})


def test_what_a_forward_appends_is_taken_away_again():
    kept, table = [], {}

    def code(net, h):
        net.kept.append(h)
        net.table["h"] = h
        return h.sum()

    model = Net(code, kept=kept, table=table)
    ph.plan(model, x(), optimizer=sgd(model))
    assert model.kept is kept and kept == [] and table == {}


def eager_steps(model, optimizer, batch, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [lambda ps: torch.optim.AdamW(ps, lr=0.01), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.2)])
def test_training_goes_to_and_fro_between_packhorse_and_torch(kind):
    model = Net(lambda net, h: h.square().mean())
    plain, batch = copy.deepcopy(model), x()
    theirs, ours = kind(plain.parameters()), kind(model.parameters())
    step = ph.compile(model, ph.plan(model, batch, optimizer=ours))
    step(batch), step(batch)
    eager_steps(model, ours, batch, 2)
    step(batch)
    eager_steps(plain, theirs, batch, 5)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))


@pytest.mark.parametrize("kind", [lambda ps: torch.optim.AdamW(ps, lr=0.01), lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.2)])
def test_an_optimizer_state_loaded_after_compiling_is_taken_over(kind):
    plain, batch = Net(lambda net, h: h.square().mean()), x()
    theirs = kind(plain.parameters())
    eager_steps(plain, theirs, batch, 3)
    model = Net(lambda net, h: h.square().mean())
    ours = kind(model.parameters())
    step = ph.compile(model, ph.plan(model, batch, optimizer=ours))
    step(batch)
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step(batch), step(batch)
    eager_steps(plain, theirs, batch, 2)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters()))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_train_all_their_weights(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = kind(16, 16, 2, batch_first=True)

        def forward(self, x):
            return self.net(x)[0].square().mean()

    torch.manual_seed(0)
    model = Recurrent()
    plain, batch = copy.deepcopy(model), {"x": torch.randn(3, 5, 16)}
    step = compiled(model, batch)
    step(batch)
    plain(**batch).backward()
    grads = step.grads()
    assert grads.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.allclose(grads[n], p.grad, rtol=0, atol=1e-6) for n, p in plain.named_parameters())  # decomposed, not the fused kernel


def test_batch_norm_in_bfloat16():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).bfloat16()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x):
            return self.net(x).square().mean()

    torch.manual_seed(0)
    assert_like_eager(Wrapped(), {"x": torch.randn(2, 3, 8, 8).bfloat16()})


def test_a_parameter_outside_the_model_and_a_foreign_scheduler_are_refused():
    other = nn.Linear(16, 16)
    model = Net(lambda net, h: h.sum())
    with pytest.raises(CaptureError, match="no parameter of the model"):
        ph.plan(model, x(), optimizer=sgd(model), loss=lambda out, batch: other(batch["x"]).sum() * out)
    plan = ph.plan(model, x(), optimizer=sgd(model))
    with pytest.raises(UserError, match="not one over the planned optimizer"):
        ph.compile(model, plan, scheduler=torch.optim.lr_scheduler.StepLR(sgd(model), 1))
    with pytest.raises(UserError, match="NoneType"):
        ph.compile(model, None)
    with pytest.raises(UserError, match=r"expected a torch.nn.Module"):
        ph.plan(x(), model, optimizer=sgd(model))


def test_a_module_exchanged_after_compiling_is_captured_anew():
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))
    batch = torch.randn(4, 16)
    step = ph.compile(model, ph.plan(model, batch, optimizer=sgd(model), loss=lambda out, _: out.sum()))
    model[1] = nn.ReLU()
    wanted = model(batch).sum().item()
    assert step(batch).item() == wanted
