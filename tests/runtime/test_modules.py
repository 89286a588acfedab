"""Two steps of a small net around each of many modules and operators: bit-equal to eager, memory exactly as predicted, nothing fragmented."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import packhorse as ph

pytestmark = pytest.mark.cpu


class Around(nn.Module):
    """linear -> the thing (a module is registered under two names) -> linear."""

    def __init__(self, thing):
        super().__init__()
        self.a, self.b, self.thing = nn.Linear(16, 16), nn.Linear(16, 16), thing if isinstance(thing, nn.Module) else None
        self.code = thing

    def forward(self, x):
        return self.b(self.code(self.a(x))).square().mean()


class Images(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.net = nn.Sequential(*modules)

    def forward(self, x):
        return self.net(x).square().mean()


class Tokens(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8, **options), nn.Linear(8, 20)

    def forward(self, x):
        return F.cross_entropy(self.out(self.embed(x)).flatten(0, 1), x.flatten(), label_smoothing=0.1)


class Unrolled(nn.Module):
    """An LSTM over time as cells: thousands of small buffers, gradients of one weight added up over steps."""

    def __init__(self, steps=12):
        super().__init__()
        self.cells, self.out = nn.ModuleList(nn.LSTMCell(16, 16) for _ in range(2)), nn.Linear(16, 16)
        self.steps = steps

    def forward(self, x):
        state, loss = [(torch.zeros(4, 16), torch.zeros(4, 16)) for _ in self.cells], 0.0
        for _ in range(self.steps):
            h = x
            for k, cell in enumerate(self.cells):
                state[k] = cell(h, state[k])
                h = state[k][0]
            loss = loss + (self.out(h) - x).square().mean()
        return loss


class Average(nn.Module):
    """Buffers changed in place, replaced, and counted."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 16)
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("n", torch.tensor(0))

    def forward(self, x):
        h = self.fc(x)
        self.mean.mul_(0.9).add_(h.detach().mean(0) * 0.1)
        self.n += 1
        self.mean = self.mean * 1.5
        return (h - self.mean).square().mean() / self.n


class Clamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a)
        return a.clamp(min=0)

    @staticmethod
    def backward(ctx, g):
        return g * (ctx.saved_tensors[0] > 0)


def autocast(h):
    with torch.autocast("cpu", torch.bfloat16):
        return (h @ torch.eye(16)).float()


ACTIVATIONS = [
    nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Hardswish, nn.Hardsigmoid, nn.Mish, nn.LogSigmoid, nn.PReLU, nn.Softsign, nn.Tanhshrink,
    nn.Hardshrink, nn.Softshrink, nn.RReLU, nn.SiLU, nn.GELU,
]  # fmt: skip

CASES = {
    **{kind.__name__: lambda kind=kind: Around(kind()) for kind in ACTIVATIONS},
    "group norm": lambda: Around(nn.GroupNorm(4, 16)),
    "rms norm": lambda: Around(nn.RMSNorm(16)),
    "batch norm": lambda: Around(nn.BatchNorm1d(16)),
    "dropout 1.0": lambda: Around(nn.Dropout(1.0)),
    "dropout 0.0": lambda: Around(nn.Dropout(0.0)),
    "alpha dropout": lambda: Around(nn.AlphaDropout(0.3)),
    "weight norm": lambda: Around(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))),
    "spectral norm": lambda: Around(nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))),
    "randn_like": lambda: Around(lambda h: h + torch.randn_like(h) * 0.1),
    "rand": lambda: Around(lambda h: h * torch.rand(4, 16)),
    "bernoulli": lambda: Around(lambda h: h * torch.bernoulli(torch.sigmoid(h.detach()))),
    "normal_": lambda: Around(lambda h: h + torch.empty(4, 16).normal_()),
    "gumbel": lambda: Around(F.gumbel_softmax),
    "randperm": lambda: Around(lambda h: h[torch.randperm(4)]),
    "multinomial": lambda: Around(lambda h: h[torch.multinomial(torch.ones(4), 3)]),
    "sort, top-k, cumsum": lambda: Around(lambda h: torch.cat([h.cumsum(1)[:, :8], h.topk(4).values, h.sort(1).values[:, :4]], 1)),
    "index": lambda: Around(lambda h: h[torch.tensor([0, 1, 1, 2])] * 1.5),
    "index_put": lambda: Around(lambda h: torch.zeros(4, 16).index_put((torch.tensor([0, 1]),), h[:2])),
    "scatter_add": lambda: Around(lambda h: torch.zeros(4, 16).scatter_add(1, torch.arange(64).view(4, 16) % 7, h)),
    "fft": lambda: Around(lambda h: torch.fft.rfft(h).abs().repeat(1, 2)[:, :16]),
    "checkpoint": lambda: Around(lambda h: torch.utils.checkpoint.checkpoint(lambda z: torch.tanh(z) * 2, h, use_reentrant=False)),
    "autograd.Function": lambda: Around(Clamp.apply),
    "autocast": lambda: Around(autocast),
    "moving averages": Average,
    "unrolled lstm": Unrolled,
    "grouped dilated convolution": lambda: Images(
        nn.Conv2d(3, 6, 3, stride=2, groups=3, dilation=2), nn.ReLU(inplace=True), nn.Dropout2d(0.2), nn.Conv2d(6, 4, 1)
    ),
    "transposed convolution": lambda: Images(nn.ConvTranspose2d(3, 4, 3, 2), nn.InstanceNorm2d(4, affine=True), nn.LeakyReLU(inplace=True)),
    "pooling": lambda: Images(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
    "resampling": lambda: Images(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AdaptiveMaxPool2d(3),
        nn.PixelShuffle(2),
    ),
    "convolution in 1 and 3 dims": lambda: Images(
        nn.Unflatten(1, (3, 1)), nn.Conv3d(3, 2, (1, 3, 3)), nn.BatchNorm3d(2), nn.Flatten(2), nn.Conv1d(2, 3, 5)
    ),
    "padding token": lambda: Tokens(padding_idx=3),
    "gradient by frequency": lambda: Tokens(scale_grad_by_freq=True),
}


class Remembers(nn.Module):
    """Leaves an activation and a counter behind, as many models do."""

    def __init__(self):
        super().__init__()
        self.fc, self.last, self.calls = nn.Linear(16, 16), None, 0

    def forward(self, x):
        self.calls += 1
        self.last = self.fc(x)
        return self.last.square().mean()


def test_planning_leaves_nothing_behind_on_the_modules():
    model = Remembers()
    before = dict(model.fc._parameters)
    step = ph.compile(model, ph.plan(model, torch.randn(4, 16), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)))
    step(torch.randn(4, 16))
    assert model.last is None and model.calls == 0
    assert all(model.fc._parameters[n] is p for n, p in before.items())


def test_a_buffer_that_changes_its_size_is_refused():
    class Grows(Average):
        def forward(self, x):
            self.mean = torch.cat([self.mean, self.mean])
            return self.fc(x).sum()

    model = Grows()
    with pytest.raises(ph.UserError, match="replaces its buffer 'mean'"):
        ph.plan(model, torch.randn(4, 16), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.mean.shape == (16,)


def batch_for(model):
    torch.manual_seed(5)
    if isinstance(model, Tokens):
        return {"x": torch.randint(0, 20, (3, 5))}
    return {"x": torch.randn(2, 3, 16, 16) if isinstance(model, Images) else torch.randn(4, 16)}


@pytest.mark.parametrize("name", CASES)
def test_two_steps_equal_eager(name):
    torch.manual_seed(0)
    model = CASES[name]().train()
    plain, batch = copy.deepcopy(model), batch_for(model)
    step = ph.compile(model, ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), clip_norm=1.0))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    torch.manual_seed(1)
    wanted = []
    for _ in range(2):
        theirs.zero_grad()
        loss = plain(**batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        wanted.append(loss.item())
    torch.manual_seed(1)
    assert [step(batch).item() for _ in range(2)] == wanted
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))
    assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes


def test_what_is_not_supported_is_refused_by_name():
    generator = torch.Generator().manual_seed(3)
    batch = {"x": torch.randn(4, 16)}
    for model, given, text in [
        (Around(lambda h: h * torch.rand(4, 16, generator=generator.manual_seed(3))), batch, "seeds the generator 0"),
        (Tokens(sparse=True), {"x": torch.randint(0, 20, (3, 5))}, "sparse=False"),
        (Tokens(max_norm=1.0), {"x": torch.randint(0, 20, (3, 5))}, "embed.weight"),
    ]:
        with pytest.raises(ph.UserError, match=text):
            ph.plan(model, given, optimizer=torch.optim.AdamW(model.parameters()))
