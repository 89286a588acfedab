"""[optimizer] and [schedule] -> torch.optim objects: what they are made with, and what is refused; a resumed torch scheduler goes on exactly."""

import copy
import io

import pytest
import torch
from torch.optim import lr_scheduler

import packhorse as ph
from packhorse.checkpoint import read_checkpoint
from packhorse.errors import CheckpointError, ConfigError
from packhorse.optim import OPTIMIZERS
from packhorse.train.config import OptimizerConfig, ScheduleConfig
from packhorse.train.config_file import config_from_dict
from packhorse.train.console import Console
from packhorse.train.metrics import read_metrics
from packhorse.train.optimizer import make_optimizer, make_scheduler
from packhorse.train.start import train

pytestmark = pytest.mark.cpu


def groups(device="cpu"):
    return [{"params": [torch.nn.Parameter(torch.ones(3, device=device))]}]


@pytest.mark.parametrize("kind", sorted(c.__name__ for c in OPTIMIZERS))
def test_every_class_by_its_lower_case_name(kind):
    made = make_optimizer(OptimizerConfig(kind=kind.lower(), lr=0.25), groups())
    assert type(made) is getattr(torch.optim, kind)
    (group,) = made.param_groups
    assert group["lr"] == 0.25 and group.get("fused") == (True if kind in ("Adagrad", "Adam", "AdamW", "SGD") else None)
    on_meta = make_optimizer(OptimizerConfig(kind=kind.lower(), lr=0.25), groups("meta")).param_groups[0]
    assert {k: v for k, v in on_meta.items() if k != "params"} == {k: v for k, v in group.items() if k != "params"}


def test_keys_and_options_reach_the_class():
    made = make_optimizer(OptimizerConfig(kind="rmsprop", momentum=0.5, options={"alpha": 0.9, "centered": True}), groups()).param_groups[0]
    assert (made["momentum"], made["alpha"], made["centered"]) == (0.5, 0.9, True)
    made = make_optimizer(OptimizerConfig(kind="rprop", options={"etas": [0.4, 1.3]}), groups()).param_groups[0]
    assert made["etas"] == (0.4, 1.3)
    made = make_optimizer(OptimizerConfig(kind="nadam", betas=(0.8, 0.9), options={"decoupled_weight_decay": True}), groups()).param_groups[0]
    assert (made["betas"], made["decoupled_weight_decay"]) == ((0.8, 0.9), True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"kind": "rmsprop", "options": {"alfa": 0.9}},
            r"unknown option optimizer\.options\.alfa; did you mean alpha\?; RMSprop has alpha, eps, centered",
        ),
        ({"options": {"lr": 0.9}}, r"which is a key of \[optimizer\] itself; write optimizer\.lr"),
        ({"options": {"params": 1}}, r"unknown option optimizer\.options\.params"),
        ({"options": {"eps": -1.0}}, r"torch\.optim\.AdamW refuses the settings of \[optimizer\]: Invalid epsilon value"),
        ({"kind": "adagrad", "options": {"lr_decay": "x"}}, r"torch\.optim\.Adagrad refuses"),
    ],
)
def test_options_that_the_class_does_not_take(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_optimizer(OptimizerConfig(**settings), groups())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ExponentalLR", {}, r"'ExponentalLR' is no scheduler of torch\.optim\.lr_scheduler; did you mean ExponentialLR\?; known: StepLR, "),
        ("ExponentialLR", {"gama": 0.9}, r"unknown option schedule\.options\.gama; did you mean gamma\?; ExponentialLR has gamma$"),
        ("ExponentialLR", {"last_epoch": 3}, r"unknown option schedule\.options\.last_epoch"),
        ("ExponentialLR", {}, r"ExponentialLR refuses schedule\.options = \{\}: .*gamma"),
        ("OneCycleLR", {"max_lr": 1.0, "pct_start": 7.0, "total_steps": 5}, "OneCycleLR refuses .*pct_start"),
        ("ReduceLROnPlateau", {}, "wants to see a metric at each step"),
        ("LambdaLR", {}, "is made from a Python function"),
        ("SequentialLR", {}, "is made from other schedulers"),
        ("LRScheduler", {}, "is no scheduler"),
    ],
)
def test_schedulers_that_cannot_be_made(name, options, message):
    optimizer = make_optimizer(OptimizerConfig(), groups())
    with pytest.raises(ConfigError, match=message) as caught:
        make_scheduler(ScheduleConfig(kind="torch", name=name, options=options), optimizer)
    assert "\n" not in str(caught.value)


def test_a_function_of_the_step_is_no_scheduler():
    assert make_scheduler(ScheduleConfig(kind="linear"), make_optimizer(OptimizerConfig(), groups())) is None


SCHEDULERS = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [2, 4], "gamma": 0.5},
    "ConstantLR": {"factor": 0.5, "total_iters": 4},
    "LinearLR": {"start_factor": 0.2, "total_iters": 5},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 6, "eta_min": 1e-4},
    "CyclicLR": {"base_lr": 1e-3, "max_lr": 1e-2, "step_size_up": 2, "mode": "exp_range", "gamma": 0.9},
    "CosineAnnealingWarmRestarts": {"T_0": 3, "T_mult": 2},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 8},
    "PolynomialLR": {"total_iters": 6, "power": 2.0},
}


def test_every_scheduler_that_a_configuration_can_describe_is_tried():
    assert set(SCHEDULERS) | {"ReduceLROnPlateau", "LambdaLR", "MultiplicativeLR", "SequentialLR", "ChainedScheduler", "LRScheduler"} == set(
        lr_scheduler.__all__
    )


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_resumed_scheduler_goes_on_exactly(name, tmp_path):
    """Against plain PyTorch over seven steps, saved and loaded after three: parameters, rates and betas, bit for bit."""
    torch.manual_seed(0)
    model, batch = torch.nn.Linear(5, 1), torch.randn(3, 5)

    def made(over):
        optimizer = make_optimizer(OptimizerConfig(kind="adamw", lr=1e-2), [{"params": list(over.parameters())}])
        return optimizer, make_scheduler(ScheduleConfig(kind="torch", name=name, options=SCHEDULERS[name]), optimizer)

    def compiled(over):
        optimizer, scheduler = made(over)
        plan = ph.plan(over, batch, optimizer=optimizer, loss=lambda out, _: out.square().mean())
        return ph.compile(over, plan, scheduler=scheduler), optimizer

    plain = copy.deepcopy(model)
    theirs, schedule = made(plain)
    wanted = []
    for _ in range(7):
        theirs.zero_grad()
        plain(batch).square().mean().backward()
        wanted.append((theirs.param_groups[0]["lr"], theirs.param_groups[0]["betas"]))
        theirs.step()
        schedule.step()
    seen = []
    step, ours = compiled(copy.deepcopy(model))
    for _ in range(3):
        seen.append((ours.param_groups[0]["lr"], ours.param_groups[0]["betas"]))
        step(batch)
    ph.save(tmp_path / "c", step)
    later = copy.deepcopy(model)
    step, ours = compiled(later)
    ph.load(tmp_path / "c", step)
    for _ in range(4):
        seen.append((ours.param_groups[0]["lr"], ours.param_groups[0]["betas"]))
        step(batch)
    assert seen == wanted
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), later.parameters()))


def test_a_checkpoint_of_another_scheduler_is_refused(tmp_path):
    model, batch = torch.nn.Linear(5, 1), torch.randn(3, 5)

    def compiled(schedule):
        over = copy.deepcopy(model)
        optimizer = torch.optim.SGD(over.parameters(), lr=0.1)
        plan = ph.plan(over, batch, optimizer=optimizer, loss=lambda out, _: out.square().mean())
        return ph.compile(over, plan, scheduler=schedule and schedule(optimizer))

    step = compiled(None)
    step(batch)
    ph.save(tmp_path / "none", step)
    other = compiled(lambda o: lr_scheduler.ExponentialLR(o, 0.9))
    with pytest.raises(CheckpointError, match="saved with no scheduler, and this step has ExponentialLR, which would start anew at step 1"):
        ph.load(tmp_path / "none", other)
    other(batch)
    ph.save(tmp_path / "exponential", other)
    with pytest.raises(CheckpointError, match="saved with ExponentialLR, and this step has StepLR"):
        ph.load(tmp_path / "exponential", compiled(lambda o: lr_scheduler.StepLR(o, 2)))
    ph.load(tmp_path / "exponential", compiled(None))


def test_a_run_with_a_torch_scheduler_resumes_exactly(texts, tmp_path):
    """Rates in closed form, and the same parameters as an unbroken run's."""

    def run(name, steps, **more):
        config = config_from_dict(
            {
                "run": {"dir": str(tmp_path / name), "steps": steps, "eval_every": 0, "eval_batches": 1, "trial_save": False} | more,
                "model": {"layers": 1, "width": 16, "heads": 2},
                "data": {"corpus": str(texts), "seq_len": 16, "micro_batch_size": 2, "global_batch_size": 2},
                "optimizer": {"kind": "rmsprop", "lr": 1e-2, "options": {"centered": True}},
                "schedule": {"kind": "torch", "name": "StepLR", "options": {"step_size": 2, "gamma": 0.5}},
            }
        )
        assert train(config, engine=ph, console=Console(io.StringIO())) == 0
        return tmp_path / name

    run("broken", 3)
    broken, whole = run("broken", 6, resume="auto"), run("whole", 6)
    assert [r["lr"] for r in read_metrics(broken / "metrics.jsonl") if r["kind"] == "step"] == [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3]
    one, other = (read_checkpoint(folder / "checkpoints" / "step-6")[0] for folder in (broken, whole))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(name.startswith("state/grad_avg") for name in one)
