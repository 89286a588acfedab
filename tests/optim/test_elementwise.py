"""A class of one's own: declared, it is planned and bit-equal to its own step(); undeclared, or an heir, it is refused with the way out."""

import copy
import textwrap

import pytest
import torch

import packhorse as ph
from packhorse.errors import UserError
from packhorse.optim import OPTIMIZERS, elementwise

pytestmark = pytest.mark.cpu
BATCH = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def lion_class():
    """The example of the documentation, run as it stands there."""
    text = elementwise.__doc__
    code = textwrap.dedent(text[text.index("    class Lion") : text.index("Elementwise means")])
    names = {"torch": torch, "packhorse": ph, "__name__": "example"}
    exec(code, names)
    return names["Lion"]


class SignedStep(torch.optim.Optimizer):
    """Keeps nothing for an element and one number a parameter: the mean of what it has seen falls into its rate. Changes the gradient in place."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state |= {"step": torch.zeros(()), "rate": torch.tensor(group["lr"])}
                    state["step"] += 1
                    signed(param, param.grad.clone(), state, state["step"].item(), group, [])


def signed(param, grad, state, count, group, space):
    grad.sign_().mul_(state["rate"])
    param.sub_(grad)
    state["rate"].mul_(1 / count)


SignedStep.elementwise = ph.Elementwise(signed, lambda group: ph.Needs(numbers={"step": 0.0, "rate": group["lr"]}, changes_grad=True))


class Heir(torch.optim.AdamW):
    """Would be another formula, for all that packhorse knows."""


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 37), torch.nn.Tanh(), torch.nn.Linear(37, 1))


def loss(out, _=None):
    return out.square().mean()


def compiled(model, optimizer, **options):
    return ph.compile(model, ph.plan(model, BATCH, optimizer=optimizer, loss=loss, **options))


def plain_step(model, optimizer, clip=None):
    optimizer.zero_grad()
    loss(model(BATCH)).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def assert_same(plain, theirs, mine, ours):
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mine.parameters()))
    wanted, seen = theirs.state_dict()["state"], ours.state_dict()["state"]
    assert {k: list(v) for k, v in wanted.items()} == {k: list(v) for k, v in seen.items()}
    assert all(torch.equal(wanted[k][n], seen[k][n]) for k in wanted for n in wanted[k])


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("own", ["Lion", "SignedStep"])
def test_a_declared_class_is_bit_equal_to_its_own_step(own, clip, lion_class, tmp_path):
    kind = lion_class if own == "Lion" else SignedStep
    options = {"lr": 1e-2, "weight_decay": 0.1} if own == "Lion" else {"lr": 1e-2}
    plain, mine = net(), net()
    theirs, ours = kind(plain.parameters(), **options), kind(mine.parameters(), **options)
    step = compiled(mine, ours, clip_norm=clip)
    for _ in range(4):
        plain_step(plain, theirs, clip)
        step(BATCH)
        assert_same(plain, theirs, mine, ours)
        assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes
    ph.save(tmp_path / "c", step)
    for model, optimizer in ((plain, theirs), (mine, ours)):  # in plain PyTorch, and back
        plain_step(model, optimizer, clip)
    step(BATCH)
    plain_step(plain, theirs, clip)
    assert_same(plain, theirs, mine, ours)
    later = net()
    fresh = kind(later.parameters(), **options)
    resumed = compiled(later, fresh, clip_norm=clip)
    ph.load(tmp_path / "c", resumed)
    for _ in range(2):
        resumed(BATCH)
    assert_same(plain, theirs, later, fresh)


def test_the_states_of_a_declared_class_are_in_the_plan(lion_class):
    model = net()
    plan = ph.plan(model, BATCH, optimizer=lion_class(model.parameters()), loss=loss)
    num_parameters = sum(p.numel() for p in model.parameters())
    assert plan.persistent.bytes_by_kind()["optimizer states"] == 4 * num_parameters + 4 * 4  # and which of the four have taken a step


def test_an_heir_without_a_declaration_is_refused_with_the_way_out(lion_class):
    model = net()
    with pytest.raises(UserError, match=r"Heir is not supported.*if its step is that of AdamW: Heir\.elementwise = (packhorse\.optim\S+)") as caught:
        compiled(model, Heir(model.parameters()))
    assert "\n" not in str(caught.value)

    class Pride(lion_class):
        pass

    with pytest.raises(UserError, match=r"if its step is that of Lion: Pride\.elementwise = Lion\.elementwise"):
        compiled(model, Pride(model.parameters()))

    class Unknown(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {})

    with pytest.raises(UserError, match=r"say what it does: Unknown\.elementwise = packhorse\.Elementwise\(\.\.\.\)$"):
        compiled(model, Unknown(model.parameters()))


def test_the_way_out_works():
    class Declared(torch.optim.AdamW):
        elementwise = OPTIMIZERS[torch.optim.AdamW]

    plain, mine = net(), net()
    theirs, ours = Declared(plain.parameters(), lr=1e-2), Declared(mine.parameters(), lr=1e-2)
    step = compiled(mine, ours)
    plain_step(plain, theirs)
    step(BATCH)
    assert_same(plain, theirs, mine, ours)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (signed, "elementwise is a function, expected a packhorse.Elementwise"),
        (ph.Elementwise(signed, ph.Needs(states={"grad": 0.0})), "needs a state called 'grad', which is taken"),
        (ph.Elementwise(signed, ph.Needs(states={"step": 0.0})), "needs a state called 'step', which is taken"),
        (ph.Elementwise(signed, ph.Needs(states={str(k): 0.0 for k in range(12)})), "keeps 12 states and numbers a parameter; at most 12"),
    ],
)
def test_declarations_that_cannot_be(declared, message):
    class Wrong(torch.optim.Optimizer):
        elementwise = declared

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "fused": False})

    model = net()
    with pytest.raises(UserError, match=message):
        compiled(model, Wrong(model.parameters()))


def test_fused_without_a_fused_formula():
    model = net()
    optimizer = SignedStep(model.parameters())
    optimizer.param_groups[0]["fused"] = True
    with pytest.raises(UserError, match=r"fused=True, but SignedStep\.elementwise has no fused formula"):
        compiled(model, optimizer)


def test_a_plan_is_not_changed_by_a_formula_that_reads_only(lion_class):
    """The gradients stay those of the loss, whatever the formula does with its copy."""
    for kind in (lion_class, SignedStep):
        plain, mine = net(), net()
        loss(plain(BATCH)).backward()
        step = compiled(mine, kind(mine.parameters()))
        step(copy.deepcopy(BATCH))
        assert all(torch.equal(p.grad, step.grads()[name]) for name, p in plain.named_parameters())
