"""16-bit steps against the same recipe written out in plain PyTorch: 16-bit copy, autocast, fp32 islands by hand, fp32 master weights."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import packhorse as ph
from packhorse.errors import NonFiniteError, UserError

pytestmark = pytest.mark.cpu
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """Embedding, norm, attention-like softmax, dropout, matrix products, a loss. `by_hand` writes the islands out."""

    def __init__(self, by_hand: bool = False):
        super().__init__()
        self.by_hand = by_hand
        self.tokens, self.norm, self.up, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 12)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids, labels):
        x = self.tokens(ids)
        norm = self.norm
        if self.by_hand:
            n = F.layer_norm(x.float(), (8,), norm.weight.float(), norm.bias.float()).to(x.dtype)
            scores = n @ n.transpose(1, 2)
            mixed = torch.softmax(scores.float(), -1).to(scores.dtype) @ n
        else:
            n = norm(x)
            mixed = torch.softmax(n @ n.transpose(1, 2), -1) @ n
        logits = self.head(self.drop(F.gelu(self.up(x + mixed)))).flatten(0, 1)
        return F.cross_entropy(logits.float() if self.by_hand else logits, labels.flatten())


class Conv(nn.Module):
    """Convolution and batch norm, fp32 input and fp32 running statistics."""

    def __init__(self, by_hand: bool = False):
        super().__init__()
        self.by_hand, self.conv, self.norm, self.head = by_hand, nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, images, labels):
        x, n = self.conv(images), self.norm
        if self.by_hand:
            n.num_batches_tracked.add_(1)
            x = F.batch_norm(x.float(), n.running_mean, n.running_var, n.weight.float(), n.bias.float(), True, n.momentum, n.eps).to(x.dtype)
        else:
            x = n(x)
        logits = self.head(F.relu(x).mean((2, 3)))
        return F.cross_entropy(logits.float() if self.by_hand else logits, labels)


def tokens():
    ids = torch.randint(0, 12, (2, 5))
    return {"ids": ids, "labels": ids.roll(1, 1)}


def images():
    return {"images": torch.randn(2, 3, 6, 6), "labels": torch.tensor([1, 3])}


CASES = {"net": (Net, tokens), "conv": (Conv, images)}


class Recipe:
    """Plain PyTorch. model: fp32, its parameters the master weights; a copy in `dtype` computes. scale: a loss scale by GradScaler's rule."""

    def __init__(self, model, dtype, make, *, clip=None, scale=1.0, grad_dtype=None, interval=2000):
        self.master, self.dtype, self.clip, self.scale, self.grad_dtype = model, dtype, clip, scale, grad_dtype or dtype
        self.optimizer, self.good, self.interval = make(model.parameters()), 0, interval
        self.half = copy.deepcopy(model)
        for p in self.half.parameters():
            p.data = p.data.to(dtype)

    def step(self, batches):
        grads = [torch.zeros_like(p, dtype=self.grad_dtype) for p in self.half.parameters()]
        with torch.no_grad():
            for narrow, wide in zip(self.half.parameters(), self.master.parameters()):
                narrow.copy_(wide)
        total = 0.0
        for batch in batches:
            with torch.autocast("cpu", self.dtype, cache_enabled=False):
                loss = self.half(**batch).float() / len(batches)
            (loss * self.scale).backward()
            total += loss.item()
            for kept, p in zip(grads, self.half.parameters()):
                kept.add_(p.grad.to(self.grad_dtype))
                p.grad = None
        for p, grad in zip(self.master.parameters(), grads):
            p.grad = grad.float() / self.scale
        overflow = not all(torch.isfinite(p.grad).all() for p in self.master.parameters())
        if not overflow:
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.master.parameters(), self.clip)
            self.optimizer.step()
        if self.scale != 1.0:
            self.good = 0 if overflow else self.good + 1
            if overflow:
                self.scale /= 2
            elif self.good == self.interval:
                self.scale, self.good = self.scale * 2, 0
        for (_, mine), (_, theirs) in zip(self.master.named_buffers(), self.half.named_buffers()):
            mine.copy_(theirs)
        return total, overflow


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_bit_equal_to_the_recipe(case, precision, clip, micros):
    kind, batch_of = CASES[case]
    torch.manual_seed(0)
    mine = kind()
    by_hand = kind(by_hand=True)
    by_hand.load_state_dict(mine.state_dict())
    batches = [batch_of() for _ in range(micros)]
    given = batches if micros > 1 else batches[0]
    recipe = Recipe(by_hand, DTYPES[precision], adamw, clip=clip, scale=65536.0 if precision == "fp16" else 1.0)
    plan = ph.plan(mine, given, optimizer=adamw(mine.parameters()), precision=precision, clip_norm=clip, num_micro_batches=micros)
    step = ph.compile(mine, plan)
    torch.manual_seed(1)
    wanted = [recipe.step(batches) for _ in range(4)]
    torch.manual_seed(1)
    for loss, overflow in wanted:
        assert abs(step(given).item() - loss) <= 1e-6 * (micros > 1) and step.last.skipped == overflow
    assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), by_hand.state_dict().values()))
    assert all(p.dtype == torch.float32 for p in mine.parameters())
    if clip is None:  # the last step's gradients, unscaled
        grads = step.grads()
        assert all(torch.equal(grads[name].float(), p.grad) for name, p in by_hand.named_parameters())
    assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes


@pytest.mark.parametrize("precision", DTYPES)
def test_gradients_kept_in_fp32(precision):
    torch.manual_seed(0)
    mine, by_hand = Net(), Net(by_hand=True)
    by_hand.load_state_dict(mine.state_dict())
    batches = [tokens() for _ in range(3)]
    recipe = Recipe(by_hand, DTYPES[precision], adamw, scale=65536.0 if precision == "fp16" else 1.0, grad_dtype=torch.float32)
    step = ph.compile(
        mine,
        ph.plan(mine, batches, optimizer=adamw(mine.parameters()), precision=precision, num_micro_batches=3, grad_dtype=torch.float32),
    )
    torch.manual_seed(1)
    for _ in range(3):
        recipe.step(batches)
    torch.manual_seed(1)
    for _ in range(3):
        step(batches)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), by_hand.parameters()))
    assert all(g.dtype == torch.float32 for g in step.grads().values())


def test_sixteen_bit_gradients_of_an_fp32_model():
    torch.manual_seed(0)
    mine = nn.Linear(8, 8)
    theirs, x = copy.deepcopy(mine), torch.randn(4, 8)
    optimizer = adamw(theirs.parameters())
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    step = ph.compile(mine, ph.plan(mine, x, optimizer=adamw(mine.parameters()), loss=loss, grad_dtype=torch.bfloat16, clip_norm=0.1))
    for _ in range(3):
        optimizer.zero_grad()
        loss(theirs(x), x).backward()
        for p in theirs.parameters():
            p.grad = p.grad.bfloat16().float()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        optimizer.step()
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), theirs.parameters()))
    assert all(g.dtype == torch.bfloat16 for g in step.grads().values())


def test_bytes_a_parameter():
    """2 + 2 + K with K = 12 for Adam (Rajbhandari et al. 2019, section 3.1), on parameters that need no padding."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for precision, grad_dtype, wanted in (("fp32", None, 16), ("bf16", None, 16), ("fp16", None, 16), ("bf16", torch.float32, 18)):
        plan = ph.plan(
            model, torch.randn(2, 64), optimizer=adamw(model.parameters()), loss=lambda y, _: y.mean(), precision=precision, grad_dtype=grad_dtype
        )
        kinds = plan.persistent.bytes_by_kind()
        kept = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer states")) + kinds.get("master weights", 0)
        assert kept - 8 == wanted * 2 * 64 * 64  # and a step count for each parameter


def test_an_overflow_skips_the_step_and_halves_the_scale():
    torch.manual_seed(0)
    mine, by_hand = Net(), Net(by_hand=True)
    by_hand.load_state_dict(mine.state_dict())
    recipe = Recipe(by_hand, torch.float16, adamw, scale=2.0**22, interval=3)
    optimizer = adamw(mine.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = ph.compile(mine, ph.plan(mine, tokens(), optimizer=optimizer, precision="fp16"), scheduler=schedule)
    recipe_schedule = torch.optim.lr_scheduler.ExponentialLR(recipe.optimizer, 0.5)
    step.loss_scale.value, step.loss_scale.growth_interval = 2.0**22, 3
    batches = [tokens() for _ in range(12)]
    torch.manual_seed(1)
    wanted, skipped = [], []
    for batch in batches:
        _, overflow = recipe.step([batch])
        if not overflow:
            recipe_schedule.step()
        wanted.append(overflow)
    torch.manual_seed(1)
    for batch in batches:
        before = copy.deepcopy(mine.state_dict())
        scale = step.loss_scale.value
        step(batch)
        skipped.append(step.last.skipped)
        assert step.last.loss_scale == scale
        unchanged = all(torch.equal(a, b) for a, b in zip(before.values(), mine.state_dict().values()))
        assert unchanged == step.last.skipped
    assert skipped == wanted and True in wanted and False in wanted
    assert step.loss_scale.value == recipe.scale
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), by_hand.parameters()))


def test_the_loss_scale_survives_a_resume(tmp_path):
    def start():
        torch.manual_seed(0)
        model = Net()
        made = ph.compile(model, ph.plan(model, tokens(), optimizer=adamw(model.parameters()), precision="fp16"))
        made.loss_scale.value, made.loss_scale.growth_interval = 2.0**22, 5
        return made

    whole = start()
    batches = [tokens() for _ in range(10)]
    torch.manual_seed(1)
    seen = []
    for number, batch in enumerate(batches):
        if number == 4:
            ph.save(tmp_path / "middle", whole)
        whole(batch)
        seen.append((whole.last.skipped, whole.last.loss_scale))
    resumed = start()
    ph.load(tmp_path / "middle", resumed)
    for number, batch in enumerate(batches[4:]):
        resumed(batch)
        assert (resumed.last.skipped, resumed.last.loss_scale) == seen[4 + number]
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters()))


def test_an_overflow_that_halving_does_not_cure_ends_the_run():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (self.w * x).sum() * 1e30 * 1e30

    model = Broken()
    step = ph.compile(model, ph.plan(model, torch.ones(4), optimizer=adamw(model.parameters()), precision="fp16"))
    with pytest.raises(NonFiniteError, match="halving has not cured"):
        for _ in range(20):
            step(torch.ones(4))
    assert torch.equal(model.w, torch.ones(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_of_another_dtype_keeps_it(dtype):
    torch.manual_seed(0)
    mine = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)).to(dtype)
    theirs, x = copy.deepcopy(mine), torch.randn(4, 8, dtype=dtype)
    optimizer = adamw(theirs.parameters())
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    step = ph.compile(mine, ph.plan(mine, x, optimizer=adamw(mine.parameters()), loss=loss, clip_norm=0.5))
    for _ in range(3):
        optimizer.zero_grad()
        wanted = loss(theirs(x), x)
        wanted.backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        assert torch.equal(step(x), wanted)
    assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(mine.parameters(), theirs.parameters()))


def test_a_sixteen_bit_model_gets_master_weights():
    torch.manual_seed(0)
    mine = Net().bfloat16()
    by_hand = Net(by_hand=True)
    by_hand.load_state_dict(mine.state_dict())  # widened: what the master weights start from
    recipe = Recipe(by_hand, torch.bfloat16, adamw, clip=0.1)
    batch = tokens()
    step = ph.compile(mine, ph.plan(mine, batch, optimizer=adamw(mine.parameters()), precision="bf16", clip_norm=0.1))
    torch.manual_seed(1)
    wanted = [recipe.step([batch])[0] for _ in range(4)]
    torch.manual_seed(1)
    assert [step(batch).item() for _ in range(4)] == wanted
    assert all(p.dtype == torch.bfloat16 and torch.equal(p, w.bfloat16()) for p, w in zip(mine.parameters(), by_hand.parameters()))


@pytest.mark.parametrize("start", [torch.float32, torch.bfloat16])
def test_values_changed_in_the_model_are_followed(start):
    """After somebody loads other values, by load_state_dict or through .data, the step trains those; untouched master weights keep their bits."""
    torch.manual_seed(0)
    model = Net().to(start)
    batch = tokens()
    step = ph.compile(model, ph.plan(model, batch, optimizer=torch.optim.SGD(model.parameters(), lr=1e-4), precision="bf16"))
    for _ in range(3):
        step(batch)
    masters = {n: t.clone() for n, t in step.training_state()[0].items() if n.startswith("master/" if start is torch.bfloat16 else "param/")}
    with torch.no_grad():
        model.up.weight.data.copy_(torch.full_like(model.up.weight, 0.5))
    frozen = copy.deepcopy(model).float()
    step(batch)
    after = dict(step.training_state()[0])
    prefix = "master/" if start is torch.bfloat16 else "param/"
    # lr 1e-4: everything but the changed weight moved by less than the change itself
    assert (after[f"{prefix}up.weight"] - 0.5).abs().max() < 1e-3
    assert all((after[n] - masters[n]).abs().max() < 1e-3 for n in masters if "up.weight" not in n)
    assert frozen.up.weight.unique().item() == 0.5


def test_refused_by_name():
    model = Net().bfloat16()
    with pytest.raises(UserError, match=r"bfloat16.*float32 model"):
        ph.plan(model, tokens(), optimizer=adamw(model.parameters()), precision="fp16")
    step = ph.compile(fresh := Net(), ph.plan(fresh, tokens(), optimizer=adamw(fresh.parameters()), precision="fp16"))
    step.loss_scale.value = 1000.0
    with pytest.raises(UserError, match="power of two"):
        step(tokens())


def test_frozen_parameters_stay():
    torch.manual_seed(0)
    model = Net()
    model.tokens.weight.requires_grad_(False)
    kept = model.tokens.weight.clone()
    step = ph.compile(model, ph.plan(model, tokens(), optimizer=adamw([p for p in model.parameters() if p.requires_grad]), precision="bf16"))
    for _ in range(2):
        step(tokens())
    assert torch.equal(model.tokens.weight, kept)


def test_an_evaluation_sees_the_present_values():
    torch.manual_seed(0)
    model, batch = Net(), tokens()
    step = ph.compile(model, ph.plan(model, batch, optimizer=adamw(model.parameters()), precision="bf16"))
    step(batch)
    by_hand = Net(by_hand=True).eval()
    by_hand.load_state_dict(model.state_dict())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        for p in by_hand.parameters():
            p.data = p.data.bfloat16()
        wanted = by_hand(**batch).float().item()
    assert step.evaluate(batch) == wanted


def test_memory_is_exact_where_master_weights_follow():
    """What follows needs scratch, which is the largest of all here."""
    model = nn.Linear(16, 16, bias=False).bfloat16()
    plan = ph.plan(model, torch.randn(2, 16), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda y, _: y.mean(), precision="bf16")
    assert plan.arena_bytes == plan.programs["agree"].arena_bytes
    step = ph.compile(model, plan)
    step(torch.randn(2, 16))
    assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes == plan.peak_bytes


def test_gradients_that_overflow_for_ever_end_the_run():
    class Steep(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return (self.w * x).float().sum() * 1e9 - (self.w * x).detach().float().sum() * 1e9  # a loss of 0

    model = Steep()
    step = ph.compile(model, ph.plan(model, torch.ones(4), optimizer=adamw(model.parameters()), precision="fp16"))
    with pytest.raises(NonFiniteError, match="norm of the gradients is inf at a loss scale of 1,"):
        for _ in range(20):
            step(torch.ones(4))
    assert torch.equal(model.w, torch.ones(4)) and step.loss_scale.value == 1.0


@pytest.mark.parametrize("value", [0.0, -2.0, 1000.0, float("inf"), float("nan"), 2.0**127, 0.5, "x", None, True])
def test_a_loss_scale_that_is_none_is_refused(value):
    model = Net()
    step = ph.compile(model, ph.plan(model, tokens(), optimizer=adamw(model.parameters()), precision="fp16"))
    step.loss_scale.value = value
    with pytest.raises(UserError, match="power of two"):
        step(tokens())


def test_gradients_stay_what_they_were_after_a_trace():
    torch.manual_seed(0)
    model, batch = Net(), tokens()
    step = ph.compile(model, ph.plan(model, batch, optimizer=adamw(model.parameters()), precision="fp16"))
    step.loss_scale.growth_interval = 1  # the scale of the next step is another one
    step(batch)
    before = step.grads()
    step.trace_nonfinite(batch)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), step.grads().values()))


def test_softmax_inside_multi_head_attention_is_an_island():
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    batch = {"query": torch.randn(2, 5, 8), "key": torch.randn(2, 5, 8), "value": torch.randn(2, 5, 8)}
    plan = ph.plan(model, batch, optimizer=adamw(model.parameters()), loss=lambda output, _: output[0].mean(), precision="bf16")
    graph = plan.programs["first"].graph
    dtypes = [node.outputs[0].dtype for node in graph.nodes if "softmax" in node.op]
    assert dtypes and set(dtypes) == {"f32"}
    assert "bf16" in {node.outputs[0].dtype for node in graph.nodes if node.op == "aten.bmm.default"}


def test_a_gradient_that_is_the_seed_and_odd_sizes_in_the_norm():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.p, self.q = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.ones(7, dtype=torch.float64))

        def forward(self, x):
            return self.p + self.q.sum().float() * x.mean()

    model = Odd()
    theirs, x = copy.deepcopy(model), torch.randn(3)
    step = ph.compile(model, ph.plan(model, x, optimizer=adamw(model.parameters()), grad_dtype=torch.bfloat16, clip_norm=0.5))
    optimizer = adamw(theirs.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        theirs(x).backward()
        for p in theirs.parameters():
            p.grad = p.grad.bfloat16().to(p.dtype)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), theirs.parameters()))


def test_a_float64_model_with_batch_norm():
    torch.manual_seed(0)
    model = Conv().double()
    batch = images()
    step = ph.compile(model, ph.plan(model, batch, optimizer=adamw(model.parameters()), precision="bf16"))
    before = model.norm.running_mean.clone()
    loss = step(batch)
    assert torch.isfinite(loss) and not torch.equal(before, model.norm.running_mean) and model.norm.running_mean.dtype == torch.float64
    assert all(p.dtype == torch.float64 for p in model.parameters())
