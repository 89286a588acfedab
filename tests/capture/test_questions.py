"""Yes-or-no questions about the batch: asked again of each batch, one program for each set of answers, always eager's bits."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import packhorse as ph
from packhorse.errors import CaptureError, UserError

pytestmark = pytest.mark.cpu


class Masked(nn.Module):
    """Two ways through, chosen by a mask: as attention code does it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x, mask):
        kept = (mask == 1).clone()
        kept[:, 0] |= False
        if kept.all():
            return self.drop(self.a(x)).square().mean() + self.b(x).mean()
        if not kept.any().item():
            return self.drop(self.b(x)).square().mean() + self.a(x).mean()
        return (self.drop(self.a(x)) * kept[..., None]).square().mean() + self.b(x).mean()


class LayerDrop(nn.Module):
    """Draws for each layer whether to skip it, as BART does."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate, self.layers, self.drop = rate, nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.5)

    def forward(self, x):
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            x = self.drop(layer(x))
        return x.square().mean()


def both(model, batches, **options):
    """Losses of one step on each batch, in plain PyTorch and planned; the compiled step."""
    plain = copy.deepcopy(model)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = ph.compile(model, ph.plan(model, batches[0], optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options))
    torch.manual_seed(5)
    wanted = []
    for batch in batches:
        theirs.zero_grad()
        micros = batch if isinstance(batch, list) else [batch]
        losses = [plain(*micro) if isinstance(micro, tuple) else plain(micro) for micro in micros]
        for loss in losses:
            (loss / len(micros)).backward()
        theirs.step()
        wanted.append([p.detach().clone() for p in plain.parameters()])
    torch.manual_seed(5)
    for batch, parameters in zip(batches, wanted):
        step(batch)
        assert all(torch.equal(mine, his) for mine, his in zip(model.parameters(), parameters))
    return step


def masks():
    full, none, some = torch.ones(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    some[1, 2:] = 0
    return full, none, some


def test_a_program_for_each_set_of_answers():
    x = torch.randn(2, 4, 8)
    full, none, some = masks()
    step = both(Masked(), [(x, full), (x, some), (x, none), (x, full), (x, some)])
    assert sum(key[0] == "first" for key in step.programs.planned) == 3


def test_another_batch_with_the_same_answers_makes_no_program():
    x = torch.randn(2, 4, 8)
    _, _, some = masks()
    other = some.clone()
    other[0, 3] = 0
    step = both(Masked(), [(x, some), (x, other)])
    assert sum(key[0] == "first" for key in step.programs.planned) == 1
    assert torch.equal(some, masks()[2])  # asking works on copies


def test_micro_batches_may_answer_differently():
    x = torch.randn(2, 4, 8)
    full, none, some = masks()
    step = both(Masked(), [[(x, full), (x, some)], [(x, none), (x, none)]], num_micro_batches=2)
    # first and next for each of the other answers come from one capture
    assert sorted(len(made) for made in step.programs.captured.values()) == [2]
    assert sorted(key[0] for key in step.programs.planned) == ["first", "first", "next", "next", "next", "update"]


def test_evaluate_asks_too():
    model, x = Masked(), torch.randn(2, 4, 8)
    full, none, some = masks()
    step = ph.compile(model, ph.plan(model, (x, full), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    for mask in (full, none, some):
        assert step.evaluate((x, mask)) == copy.deepcopy(model).eval()(x, mask).item()


def test_a_layer_drop_of_zero_draws_and_skips_nothing():
    both(LayerDrop(0.0), [torch.randn(4, 8), torch.randn(4, 8)])


def test_a_layer_drop_above_zero_is_refused_by_name():
    with pytest.raises(CaptureError, match=r"test_questions.py:\d+.*a random draw decides what runs"):
        ph.plan(model := LayerDrop(0.5), torch.randn(4, 8), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


class Asks(nn.Module):
    def __init__(self, question):
        super().__init__()
        self.linear, self.question = nn.Linear(8, 8), question

    def forward(self, x, n):
        return self.linear(x).mean() * (2.0 if self.question(x, n) else 1.0)


def _filled(function):
    """A question about a tensor that is known until `function` writes something unknown to it."""

    def ask(x, n):
        known = torch.zeros(2)
        function(known, x)
        return (known < 0.5).any()

    return ask


REFUSED = {
    "drawn in place": _filled(lambda known, x: known.normal_()),
    "drawn into": _filled(lambda known, x: torch.randn(2, out=known)),
    "dropped in place": _filled(lambda known, x: F.dropout(known, inplace=True)),
    "written by out=": _filled(lambda known, x: torch.add(x[0, :2].detach(), 0, out=known)),
    "written through a view": _filled(lambda known, x: known.view_as(x[0, :2]).copy_(x[0, :2].detach())),
    "written by a foreach": _filled(lambda known, x: torch._foreach_add_([torch.zeros(2), known], [x[0, :2].detach(), x[1, :2].detach()])),
    "a draw that was changed": lambda x, n: torch.rand([]).mul_(10) < 1,
    "two draws": lambda x, n: (torch.rand(2) < 1).all(),
    "a float": lambda x, n: x.sum() > 0,
    "a number taken out": lambda x, n: n.max().item() > 3,
    "an activation": lambda x, n: (x * 2).max() > 0,
    "known, then changed by something unknown": lambda x, n: n.clone().add_((x > 0).sum()).any(),
    "a draw of whole numbers": lambda x, n: torch.randint(0, 2, (1,)).any(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_questions_are_refused_with_their_line(name):
    model = Asks(REFUSED[name])
    with pytest.raises(CaptureError, match=r"test_questions.py:\d+"):
        ph.plan(model, (torch.randn(2, 8), torch.tensor([1, 2])), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


ANSWERED = {
    "torch.equal": lambda x, n: torch.equal(n, torch.tensor([1, 2])),
    "a constant": lambda x, n: torch.arange(3).any(),
    "changed in place": lambda x, n: n.clone().add_(torch.ones_like(n)).ge(4).any(),
    "through floats": lambda x, n: (n.float() / 2).sum() >= 2.5,
    "a view that is written": lambda x, n: _written(n),
    "a view of what out= wrote": lambda x, n: _tripled(n),
    "membership": lambda x, n: 3 in n,
    "is_nonzero": lambda x, n: torch.is_nonzero(n.sum() - 3),
}


def _tripled(n):
    known = n.clone()
    view = known[1:]
    torch.mul(known, 3, out=known)
    return (view > 3).any()


def _written(n):
    copied = n.clone()
    copied[1:] = 0
    return copied.sum() > 3


@pytest.mark.parametrize("name", ANSWERED)
def test_each_kind_of_question(name):
    question = ANSWERED[name]
    batches = [(torch.randn(2, 8), torch.tensor(n)) for n in ([1, 2], [3, 0], [1, 2], [4, 4])]
    both(Asks(question), batches)


def test_python_and_numpy_draws_are_refused():
    import random

    import numpy

    for draw in (random.random, numpy.random.rand):
        with pytest.raises(CaptureError, match="Python's or numpy's generator"):
            ph.plan(
                model := Asks(lambda x, n, draw=draw: draw() < 2), (torch.randn(2, 8), torch.ones(1)), optimizer=torch.optim.SGD(model.parameters())
            )


def test_a_batch_without_values_is_refused():
    model, (full, _, _) = Masked().to("meta"), masks()
    with pytest.raises(CaptureError, match="looks at the values"):
        ph.plan(model, (torch.randn(2, 4, 8, device="meta"), full.to("meta")), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_the_loss_may_ask_as_well():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x, y):
            return self.linear(x)

    def loss(output, batch):
        return F.cross_entropy(output, batch[1]) if (batch[1] >= 0).all() else F.cross_entropy(output, batch[1], ignore_index=-1) * 2

    model = Plain()
    step = ph.compile(
        model, ph.plan(model, (torch.randn(3, 8), torch.tensor([0, 1, 2])), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=loss)
    )
    for labels in ([0, 1, 2], [0, -1, 2]):
        batch = (torch.randn(3, 8), torch.tensor(labels))
        wanted = loss(copy.deepcopy(model)(*batch), batch).item()
        assert step(batch).item() == wanted


def test_asking_under_autocast_is_repeated_under_autocast():
    """A product of masks rounds otherwise in 16 bits: 257 is no bfloat16."""

    def question(x, n):
        with torch.autocast("cpu", torch.bfloat16):
            return ((n.float()[:, None] @ torch.ones(1, 1))[0, 0] == 256).any()

    batches = [(torch.randn(2, 8), torch.tensor(n)) for n in ([257, 0], [256, 1], [300, 0])]
    step = both(Asks(question), batches)
    assert sum(key[0] == "first" for key in step.programs.planned) == 2


def test_equal_questions_are_asked_once_and_nothing_is_kept():
    """As many layers each make the same mask: the replay makes it once, and lets each tensor go after its last reader."""

    def question(x, n):
        return all(bool((n > 0).all() and (n < 9).all()) for _ in range(12))

    step = both(Asks(question), [(torch.randn(2, 8), torch.tensor([1, 2])), (torch.randn(2, 8), torch.tensor([3, 2]))])
    asked = step.job.questions
    assert len(asked.calls) == 6 and len(asked.asked) == 2  # two comparisons, two all(), two answers
    assert sorted(slot for done in asked.done for slot in done) == sorted({*asked.leaves, *(s for call in asked.calls for s in call.results)})


def test_a_question_that_fails_on_another_batch_is_another_answer():
    question = lambda x, n: (torch.tensor([0, 1, 1, 0])[n] > 0).any()  # noqa: E731
    step = both(Asks(question), [(torch.randn(2, 8), torch.tensor([1, 2])), (torch.randn(2, 8), torch.tensor([0, 3]))])
    with pytest.raises(CaptureError, match="out of bounds"):
        step((torch.randn(2, 8), torch.tensor([1, 9])))


def test_a_loss_of_another_dtype_is_refused_before_it_runs():
    class Widens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, mask):
            loss = self.linear(x).square().mean()
            return loss if mask.all() else loss.double()

    model, x = Widens(), torch.randn(2, 8)
    full, none = torch.ones(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    step = ph.compile(model, ph.plan(model, (x, full), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    before = copy.deepcopy(model.state_dict())
    for run in (step, step.evaluate):
        with pytest.raises(CaptureError, match=r"f64\[\], planned as f32"):
            run((x, none))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values()))
    step((x, full))


def test_an_assertion_of_the_model_stays():
    """F.one_hot checks its labels without giving anything."""

    class Hot(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x, y):
            return (self.linear(x) * F.one_hot(y, 4)).sum()

    step = both(Hot(), [(torch.randn(2, 8), torch.tensor([1, 3])), (torch.randn(2, 8), torch.tensor([0, 2]))])
    with pytest.raises(UserError, match="_assert_async"):
        step((torch.randn(2, 8), torch.tensor([0, 5])))
