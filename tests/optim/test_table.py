"""Every class and setting against torch.optim itself: parameters and optimizer.state_dict(), bit for bit, step by step."""

import copy

import pytest
import torch
from torch import optim
from torch.profiler import ProfilerActivity, profile

import packhorse as ph
from packhorse.errors import UserError
from packhorse.optim import OPTIMIZERS

pytestmark = pytest.mark.cpu
STEPS = 8
SETTINGS = {
    "adadelta": (optim.Adadelta, {"lr": 0.5}),
    "adadelta decay maximize": (optim.Adadelta, {"lr": 0.5, "rho": 0.8, "eps": 1e-5, "weight_decay": 0.1, "maximize": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.1}),
    "adagrad start": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    "adagrad maximize": (optim.Adagrad, {"lr": 1e-3, "maximize": True}),
    "adagrad fused": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.3, "fused": True}),
    "adagrad fused maximize": (optim.Adagrad, {"lr": 1e-3, "maximize": True, "fused": True}),
    "adam": (optim.Adam, {"lr": 1e-2}),
    "adam decay maximize": (optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "adam decoupled amsgrad": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True, "amsgrad": True}),
    "adam fused": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}),
    "adamw": (optim.AdamW, {"lr": 1e-2}),
    "adamw maximize": (optim.AdamW, {"lr": 1e-3, "betas": (0.8, 0.9), "maximize": True}),
    "adamw fused amsgrad": (optim.AdamW, {"lr": 1e-2, "amsgrad": True, "maximize": True, "fused": True}),
    "adamax": (optim.Adamax, {"lr": 1e-2}),
    "adamax decay maximize": (optim.Adamax, {"lr": 1e-3, "betas": (0.8, 0.9), "weight_decay": 0.1, "maximize": True}),
    "asgd": (optim.ASGD, {"lr": 0.1}),
    "asgd averaging": (optim.ASGD, {"lr": 0.1, "lambd": 1e-2, "alpha": 0.6, "t0": 2, "weight_decay": 0.1, "maximize": True}),
    "nadam": (optim.NAdam, {"lr": 1e-2}),
    "nadam decay": (optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "momentum_decay": 0.1, "maximize": True}),
    "nadam decoupled": (optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"lr": 1e-2}),  # rectified from step 6 on
    "radam rectified": (optim.RAdam, {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}),
    "radam decoupled": (optim.RAdam, {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-2}),
    "rmsprop momentum": (optim.RMSprop, {"lr": 1e-2, "alpha": 0.9, "momentum": 0.9, "weight_decay": 0.1}),
    "rmsprop centered": (optim.RMSprop, {"lr": 1e-2, "centered": True, "maximize": True}),
    "rmsprop centered momentum": (optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {"lr": 1e-2}),
    "rprop maximize": (optim.Rprop, {"lr": 1e-2, "etas": (0.3, 1.4), "step_sizes": (1e-3, 0.02), "maximize": True}),
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd decay maximize": (optim.SGD, {"lr": 1e-3, "weight_decay": 0.1, "maximize": True}),
    "sgd momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    "sgd nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd fused": (optim.SGD, {"lr": 0.1, "fused": True}),
    "sgd fused momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "fused": True}),
}


def make(name: str, parameters):
    """The optimizer of that name over the parameters."""
    kind, options = SETTINGS[name]
    return kind(parameters, **options)


class Net(torch.nn.Module):
    """Small, with a 0-dim parameter, sizes that are no multiple of a vector, and one parameter that never gets a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.scale = torch.nn.Linear(5, 37), torch.nn.Linear(37, 3), torch.nn.Parameter(torch.tensor(1.5))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.last(torch.tanh(self.first(x)) * self.scale), y)


def batch(step, micros=1):
    g = torch.Generator().manual_seed(step)
    found = [{"x": torch.randn(4, 5, generator=g), "y": torch.randint(0, 3, (4,), generator=g)} for _ in range(micros)]
    return found if micros > 1 else found[0]


def set_rate(optimizer, step):
    """Another learning rate at every step, the first included."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("first_lr", group["lr"]) * (1 + step % 3)


def plain_step(model, optimizer, given, clip=None):
    micros = given if isinstance(given, list) else [given]
    optimizer.zero_grad()
    for micro in micros:
        (model(**micro) / len(micros)).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def pair(name):
    torch.manual_seed(0)
    plain = Net()
    mine = copy.deepcopy(plain)
    return plain, make(name, plain.parameters()), mine, make(name, mine.parameters())


def compiled(model, optimizer, micros=1, clip=None):
    plan = ph.plan(model, batch(0, micros), optimizer=optimizer, num_micro_batches=micros, clip_norm=clip)
    return ph.compile(model, plan)


def assert_same(plain, theirs, mine, ours):
    for (name, a), b in zip(plain.state_dict().items(), mine.state_dict().values()):
        assert torch.equal(a, b), name
    wanted, seen = theirs.state_dict()["state"], ours.state_dict()["state"]
    assert wanted.keys() == seen.keys()
    for index in wanted:
        assert list(wanted[index]) == list(seen[index])
        for name, value in wanted[index].items():
            found = seen[index][name]
            assert (found.dtype, found.shape) == (value.dtype, value.shape), name
            assert torch.equal(found, value), name


@pytest.mark.parametrize("name", SETTINGS)
def test_parameters_and_state_are_those_of_torch(name):
    """With clipping and three micro-batches too; and plain PyTorch goes on from the state, in place and from its state_dict()."""
    for micros, clip in [(1, None), (3, 0.3)]:
        plain, theirs, mine, ours = pair(name)
        step = compiled(mine, ours, micros, clip)
        for k in range(STEPS):
            set_rate(theirs, k)
            set_rate(ours, k)
            plain_step(plain, theirs, batch(k, micros), clip)
            step(batch(k, micros))
            assert_same(plain, theirs, mine, ours)
            assert step.measured["update"].arena_bytes == step.plan.programs["update"].arena_bytes
        ledger = step.ledger()
        assert ledger.measured_peak_bytes == ledger.predicted_peak_bytes
    other = copy.deepcopy(plain)
    fresh = make(name, other.parameters())
    fresh.load_state_dict(copy.deepcopy(ours.state_dict()))
    for k in range(2):
        plain_step(plain, theirs, batch(k))
        plain_step(other, fresh, batch(k))
        plain_step(mine, ours, batch(k))
    assert_same(plain, theirs, mine, ours)
    assert_same(plain, theirs, other, fresh)
    for p in mine.parameters():
        p.grad = None
    step(batch(9, 3))
    plain_step(plain, theirs, batch(9, 3), 0.3)
    assert_same(plain, theirs, mine, ours)
    assert_allocates_nothing(step.programs.bound[("update",)].steps[-1])


def assert_allocates_nothing(kernel):
    """Numbers wrapped for a kernel take some bytes each; no tensor of a parameter's size is made."""
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kernel()
    assert max((e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), default=0) <= 16


@pytest.mark.parametrize("name", SETTINGS)
def test_resuming_and_taking_over_a_state(name, tmp_path):
    plain, theirs, mine, ours = pair(name)
    for k in range(3):
        plain_step(plain, theirs, batch(k))
    mine.load_state_dict(plain.state_dict())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step = compiled(mine, ours)
    for k in range(3, 5):
        plain_step(plain, theirs, batch(k))
        step(batch(k))
    ph.save(tmp_path / "c", step)
    _, _, later, optimizer = pair(name)
    resumed = compiled(later, optimizer)
    ph.load(tmp_path / "c", resumed)
    for k in range(5, 7):
        plain_step(plain, theirs, batch(k))
        resumed(batch(k))
    assert_same(plain, theirs, later, optimizer)


@pytest.mark.parametrize("name", ["adagrad start", "asgd", "nadam", "rprop", "sgd momentum"])
def test_a_checkpoint_of_before_the_first_step(name, tmp_path):
    """The start values of states are those of the learning rate of the first step, in whichever process that is."""
    plain, theirs, mine, ours = pair(name)
    ph.save(tmp_path / "c", compiled(mine, ours))
    _, _, later, optimizer = pair(name)
    resumed = compiled(later, optimizer)
    ph.load(tmp_path / "c", resumed)
    for k in range(1, 3):
        set_rate(theirs, k)
        set_rate(optimizer, k)
        plain_step(plain, theirs, batch(k))
        resumed(batch(k))
    assert_same(plain, theirs, later, optimizer)


@pytest.mark.parametrize("name", ["adagrad start", "adagrad fused", "nadam", "rprop"])
def test_states_that_somebody_removed_start_anew(name):
    plain, theirs, mine, ours = pair(name)
    step = compiled(mine, ours)
    for optimizer in (theirs, ours):
        optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    plain_step(plain, theirs, batch(0))
    step(batch(0))
    assert_same(plain, theirs, mine, ours)


@pytest.mark.parametrize("name", ["adagrad", "adam", "adamw fused amsgrad", "asgd", "nadam", "radam", "rprop", "rmsprop", "sgd momentum"])
def test_a_learning_rate_that_is_a_tensor(name):
    kind, options = SETTINGS[name]
    options = options | {"lr": torch.tensor(0.0123)}
    torch.manual_seed(0)
    plain = Net()
    mine = copy.deepcopy(plain)
    theirs, ours = kind(plain.parameters(), **options), kind(mine.parameters(), **options)
    step = compiled(mine, ours, clip=0.3)
    for k in range(4):
        plain_step(plain, theirs, batch(k), 0.3)
        step(batch(k))
    assert_same(plain, theirs, mine, ours)


def test_parameters_of_one_group_may_have_taken_different_numbers_of_steps():
    for name in ("adamw", "adam fused", "nadam", "sgd momentum"):
        plain, theirs, mine, ours = pair(name)
        plain.scale.requires_grad_(False)
        plain_step(plain, theirs, batch(0))
        plain.scale.requires_grad_(True)
        mine.load_state_dict(plain.state_dict())
        ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
        step = compiled(mine, ours)
        for k in range(2):
            plain_step(plain, theirs, batch(k))
            step(batch(k))
        assert_same(plain, theirs, mine, ours)


def test_a_fused_first_step_beside_later_ones_is_refused():
    plain, theirs, mine, ours = pair("sgd fused momentum")
    plain.scale.requires_grad_(False)
    plain_step(plain, theirs, batch(0))
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(UserError, match=r"at their first step .* fused=False"):
        compiled(mine, ours)


def test_the_table_is_all_of_torch_but_what_is_refused_by_name():
    classes = {c for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)} - {torch.optim.Optimizer}
    refused = {torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon, torch.optim.Adafactor}
    assert set(OPTIMIZERS) == classes - refused == {kind for kind, _ in SETTINGS.values()}
    model = torch.nn.Linear(3, 3, bias=False)
    for kind, reason in zip(
        (torch.optim.LBFGS, torch.optim.SparseAdam, torch.optim.Muon, torch.optim.Adafactor), ("closure", "sparse", "matrix", "rows")
    ):
        with pytest.raises(UserError, match=f"torch.optim.{kind.__name__} is not supported: .*{reason}.*; use torch.optim.Adam"):
            ph.plan(model, torch.ones(1, 3), optimizer=kind(model.parameters()), loss=lambda out, _: out.sum())


@pytest.mark.parametrize(
    ("make_one", "message"),
    [
        (lambda ps: torch.optim.Adamax(ps, differentiable=True), "differentiable=True"),
        (lambda ps: torch.optim.RAdam(ps, foreach=True), "rounds otherwise than without.*foreach=False"),
    ],
)
def test_settings_that_cannot_be_honoured(make_one, message):
    model = Net()
    with pytest.raises(UserError, match=message):
        compiled(model, make_one(model.parameters()))


@pytest.mark.parametrize(
    ("name", "key", "value"), [("rmsprop", "centered", True), ("rmsprop", "momentum", 0.5), ("nadam", "maximize", True), ("sgd", "weight_decay", 0.1)]
)
def test_a_changed_setting_that_needs_other_memory_is_named(name, key, value):
    _, _, mine, ours = pair(name)
    step = compiled(mine, ours)
    before = ours.param_groups[0][key]
    ours.param_groups[0].update({key: value, "lr": 0.7})
    with pytest.raises(UserError, match=f"parameter group 0 of the optimizer was changed in {key} since packhorse.plan"):
        step(batch(0))
    ours.param_groups[0][key] = before
    step(batch(0))


def test_settings_loaded_with_a_state_are_used():
    """load_state_dict exchanges the group dicts; the step reads the new ones."""
    plain, theirs, mine, ours = pair("adamw")
    step = compiled(mine, ours)
    step(batch(0))
    plain_step(plain, theirs, batch(0))
    theirs.param_groups[0]["betas"] = (0.5, 0.6)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    plain_step(plain, theirs, batch(1))
    step(batch(1))
    assert_same(plain, theirs, mine, ours)
