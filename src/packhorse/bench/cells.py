"""`packhorse bench frontier --cells`: does a budget hold? Models of every shape x 8 budgets from all to the least that works.

Of each cell: measured peak <= budget, measured == predicted, no more than at the budget before (monotone), and losses, gradients and buffers
bit-equal to eager PyTorch's over two steps of SGD with dropout on. Small models: the whole matrix takes minutes on one core.
"""

import copy
import difflib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import packhorse
from packhorse.bench.replan import replanned
from packhorse.bench.rivals import loss_of
from packhorse.errors import UserError
from packhorse.models.gpt import GPT
from packhorse.models.lstm import LSTM
from packhorse.models.resnet import equal_stages
from packhorse.planning.plan import Plan

NUM_BUDGETS, NUM_STEPS, LEARNING_RATE, VOCAB = 8, 2, 0.01, 64


@dataclass(frozen=True)
class Model:
    """make() -> a model in training mode; batch() -> keyword arguments for it, or positional ones as a tuple."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One budget of one model. equal: losses, gradients and buffers are eager's. All bytes of the whole step."""

    budget_bytes: int
    predicted_bytes: int
    measured_bytes: int
    equal: bool

    @property
    def held(self) -> bool:
        return self.measured_bytes <= self.budget_bytes

    @property
    def exact(self) -> bool:
        return self.measured_bytes == self.predicted_bytes


@dataclass(frozen=True)
class Outcome:
    """What became of a model. none_bytes, least_bytes: peaks of the whole step, that of them persistent_bytes; seconds on the clock for all cells.

    failure: what was said instead; the cells before it still stand.
    """

    name: str
    nodes: int = 0
    none_bytes: int = 0
    least_bytes: int = 0
    persistent_bytes: int = 0
    cells: tuple[Cell, ...] = ()
    seconds: float = 0.0
    failure: str = ""

    @property
    def monotone(self) -> bool:
        """A smaller budget never measured more."""
        return all(later.measured_bytes <= earlier.measured_bytes for earlier, later in pairwise(self.cells))

    @property
    def kept(self) -> bool:
        """Every promise in every cell."""
        good = all(cell.held and cell.exact and cell.equal for cell in self.cells)
        return good and self.monotone and not self.failure and len(self.cells) == NUM_BUDGETS


# -- models --------------------------------------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Three levels down and up with a skip at each (Ronneberger et al. 2015, arXiv:1505.04597), group norm; a class of two for each pixel."""

    def __init__(self, width: int = 8, levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *widths], widths[:-1]))
        self.bottom = self._pair(widths[-2], widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(widths))
        self.join = nn.ModuleList(self._pair(2 * a, a) for a in widths[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def _pair(channels: int, out: int) -> nn.Module:
        once = lambda a, b: (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())  # noqa: E731
        return nn.Sequential(*once(channels, out), *once(out, out), nn.Dropout2d(0.1))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        skips, x = [], images
        for pair in self.down:
            skips.append(pair(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, join, skip in reversed(list(zip(self.up, self.join, skips))):
            x = join(torch.cat([skip, up(x)], 1))
        return F.cross_entropy(self.head(x), labels[:, None, None].expand(-1, *images.shape[2:]) % 2)


class DenseNet(nn.Module):
    """Dense blocks with a transition between them; each layer reads all before it in its block (Huang et al. 2017, arXiv:1608.06993)."""

    def __init__(self, blocks: int = 3, layers: int = 6, growth: int = 8) -> None:
        super().__init__()
        channels = 2 * growth
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for _ in range(blocks):
            inside = range(channels, channels + layers * growth, growth)
            self.blocks.append(nn.ModuleList(self._layer(c, growth) for c in inside))
            channels = (channels + layers * growth) // 2
            self.transitions.append(
                nn.Sequential(nn.BatchNorm2d(2 * channels), nn.ReLU(inplace=True), nn.Conv2d(2 * channels, channels, 1, bias=False))
            )
        self.head = nn.Linear(channels, 10)

    @staticmethod
    def _layer(channels: int, growth: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Conv2d(channels, growth, 3, padding=1, bias=False))

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block, transition in zip(self.blocks, self.transitions):
            for layer in block:  # type: ignore[attr-defined]
                x = torch.cat([x, layer(x)], 1)
            x = F.avg_pool2d(transition(x), 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Experts(nn.Module):
    """x (N, D) -> (N, D): each expert takes the `capacity` tokens that want it most, however many want it (Zhou et al. 2022, arXiv:2202.09368)."""

    def __init__(self, width: int, experts: int, capacity: int) -> None:
        super().__init__()
        self.capacity, self.router = capacity, nn.Linear(width, experts, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(experts, *shape) * 0.1) for shape in ((width, 2 * width), (2 * width, width)))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).t().topk(self.capacity)
        hidden = torch.bmm(F.gelu(torch.bmm(x[chosen], self.up)), self.down) * weight[..., None]
        return torch.zeros_like(x).index_add(0, chosen.flatten(), hidden.flatten(0, 1))


class MixtureBlock(nn.Module):
    """Attention, then experts, each added to the stream that it read."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out, self.drop = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Dropout(0.1)
        self.experts = Experts(width, experts=4, capacity=tokens // 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)))
        return x + self.drop(self.experts(self.norms[1](x).flatten(0, 1)).view_as(x))


class Mixture(nn.Module):
    """A language model whose blocks are mixtures of experts with static capacity."""

    def __init__(self, layers: int = 6, width: int = 32, tokens: int = 64) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.Sequential(*(MixtureBlock(width, tokens) for _ in range(layers)))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.tokens(ids))).flatten(0, 1), labels.flatten())


def _hugging_face(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        try:
            import transformers
        except ImportError:
            raise UserError("needs transformers: pip install 'packhorse[hf]'") from None
        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return make


def _pairs(rows: int, length: int, names: tuple[str, str] = ("ids", "labels")) -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randint(4, VOCAB, (rows, length)) for name in names}


def _images(rows: int, side: int, name: str = "images") -> Callable[[], dict[str, Any]]:
    return lambda: {name: torch.randn(rows, 3, side, side), "labels": torch.randint(0, 10, (rows,))}


_TEXT = ("input_ids", "labels")


def models() -> list[Model]:
    """The rows of the matrix."""
    gpt: dict[str, Any] = {"vocab": VOCAB, "heads": 4, "seq_len": 32, "dropout": 0.1}
    return [
        Model("ResNet-128", lambda: equal_stages(128, classes=10, width=4), _images(4, 64)),
        Model("LSTM-256", lambda: LSTM(vocab=VOCAB, layers=1, width=16, dropout=0.1), _pairs(4, 256)),
        Model("GPT-12", lambda: GPT(layers=12, width=64, **gpt), _pairs(2, 32)),
        Model("GPT-24", lambda: GPT(layers=24, width=32, **gpt), _pairs(2, 32)),
        Model("U-Net", UNet, _images(2, 32)),
        Model("DenseNet", DenseNet, _images(4, 16)),
        Model("mixture of experts, static capacity", Mixture, _pairs(2, 32)),
        Model("Hugging Face Llama",
            _hugging_face("LlamaForCausalLM", "LlamaConfig", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=6, num_attention_heads=4,
                num_key_value_heads=2, intermediate_size=64, max_position_embeddings=64, attention_dropout=0.1, use_cache=False),
            _pairs(2, 32, _TEXT)),
        Model("Hugging Face T5",
            _hugging_face("T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=64, num_layers=4, num_heads=4,
                decoder_start_token_id=0, use_cache=False),
            _pairs(2, 32, _TEXT)),
        Model("Hugging Face ViT",
            _hugging_face("ViTForImageClassification", "ViTConfig", hidden_size=32, num_hidden_layers=6, num_attention_heads=4,
                intermediate_size=64, image_size=32, patch_size=8, num_labels=10, hidden_dropout_prob=0.1),
            _images(4, 32, "pixel_values")),
    ]  # fmt: skip


# -- the matrix ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """Losses of the steps; gradients and buffers after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def same(self, other: "_Seen") -> bool:
        """Bit for bit, in what `self` has."""
        tables = ((self.gradients, other.gradients), (self.buffers, other.buffers))
        return self.losses == other.losses and all(torch.equal(t, theirs[name]) for mine, theirs in tables for name, t in mine.items())


def _eager(model: nn.Module, batch: dict[str, Any]) -> _Seen:
    mine = copy.deepcopy(model)
    optimizer = torch.optim.SGD(mine.parameters(), lr=LEARNING_RATE)
    torch.manual_seed(1)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(mine, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return _Seen(losses, {n: p.grad for n, p in mine.named_parameters() if p.grad is not None}, dict(mine.named_buffers()))


def _copied(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    mine = copy.deepcopy(model)
    return mine, torch.optim.SGD(mine.parameters(), lr=LEARNING_RATE)


def cell(model: nn.Module, batch: dict[str, Any], none: Plan, reference: _Seen, method: str, budget: int | str) -> Cell:
    """Plans and runs one budget ("minimum": the least). none: the plan that keeps everything. Raises BudgetError if the method cannot meet it."""
    mine, optimizer = _copied(model)
    plan = replanned(none, mine, optimizer, method, budget)
    step = packhorse.compile(mine, plan)
    torch.manual_seed(1)
    losses = [step(batch).item() for _ in range(NUM_STEPS)]
    ledger = step.ledger()
    assert ledger.measured_peak_bytes is not None
    equal = reference.same(_Seen(losses, step.grads(), dict(mine.named_buffers())))
    return Cell(budget if isinstance(budget, int) else plan.peak_bytes, plan.peak_bytes, ledger.measured_peak_bytes, equal)


def attempt(model: Model, method: str = "optimal", num_budgets: int = NUM_BUDGETS) -> Outcome:
    """All budgets of one model, in equal steps from what keeping everything takes to the least that the method can."""
    start = time.perf_counter()
    outcome, cells, least = Outcome(model.name), [], None
    try:
        torch.manual_seed(0)
        made, batch = model.make().train(), model.batch()
        reference = _eager(made, batch)
        mine, optimizer = _copied(made)
        none = packhorse.plan(mine, batch, optimizer=optimizer, recompute="none")
        outcome = Outcome(model.name, len(none.programs["first"].graph.nodes), none.peak_bytes, none.peak_bytes, none.persistent_bytes)
        least = cell(made, batch, none, reference, method, "minimum")
        outcome = replace(outcome, least_bytes=least.predicted_bytes)
        for part in range(num_budgets - 1, 0, -1):
            budget = least.predicted_bytes + (none.peak_bytes - least.predicted_bytes) * part // (num_budgets - 1)
            cells.append(cell(made, batch, none, reference, method, budget))
        failure = ""
    except UserError as error:
        failure = str(error)
    return replace(outcome, cells=tuple(cells) + ((least,) if least else ()), seconds=time.perf_counter() - start, failure=failure)


def measure(names: Sequence[str], say: Callable[[str], None]) -> list[Outcome]:
    """The matrix, or the rows whose names contain a word of `names`. Raises UserError for a word that is in none."""
    known = models()
    for name in names:
        if not any(name.lower() in model.name.lower() for model in known):
            close = difflib.get_close_matches(name, [model.name for model in known], n=3, cutoff=0.3)
            raise UserError(f"bench frontier --cells: no model is called {name}; the nearest are {', '.join(close or [m.name for m in known])}")
    found = []
    for model in known:
        if not names or any(name.lower() in model.name.lower() for name in names):
            found.append(attempt(model))
            said = found[-1].failure or f"{sum(c.held for c in found[-1].cells)} of {len(found[-1].cells)} budgets held"
            say(f"{model.name}: {said} ({found[-1].seconds:.0f} s)")
    return found


def render(outcomes: Sequence[Outcome]) -> str:
    """A row a model, as Markdown. Peaks are of the whole step; "intermediates" leaves out parameters, gradients, optimizer states and buffers."""
    cells = [cell for outcome in outcomes for cell in outcome.cells]
    header = ["model", "nodes", "keep everything, MiB", "least, MiB", "least / everything", "of intermediates"]
    header += ["held", "exact", "bit-equal", "monotone", "seconds", ""]
    lines = [
        f"{len(cells)} cells: {sum(c.held for c in cells)} within their budget, {sum(c.exact for c in cells)} measured as predicted, "
        f"{sum(c.equal for c in cells)} with losses, gradients and buffers bit-equal to eager PyTorch's.",
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
    ]
    for o in outcomes:
        columns = [o.name, *[""] * 10, o.failure]
        if o.none_bytes:
            inside = (o.least_bytes - o.persistent_bytes) / (o.none_bytes - o.persistent_bytes)
            sizes = (o.none_bytes / 2**20, o.least_bytes / 2**20, o.least_bytes / o.none_bytes, inside)
            columns[1:6] = [str(o.nodes), *(f"{size:.3f}" for size in sizes)]
            columns[6:9] = [f"{sum(values)} of {len(o.cells)}" for values in zip(*((c.held, c.exact, c.equal) for c in o.cells))] or [""] * 3
            columns[9:11] = ["yes" if o.monotone else "**no**", f"{o.seconds:.0f}"]
        lines.append("| " + " | ".join(column.replace("|", "\\|") for column in columns) + " |")
    return "\n".join(lines)
