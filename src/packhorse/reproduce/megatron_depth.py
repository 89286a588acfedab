"""`packhorse reproduce megatron`: BERT with layer norms before attention and feed-forward, and after the sums as it was published, at a depth of 48
(Shoeybi et al. 2019, arXiv:1909.08053, section 5.3 and figure 7): gradients at the start, and losses of short runs.

Both are trained by one recipe, the paper's (section 4.2) brought to a small width. Weights are drawn from N(0, s), s = 0.02 for 1,024 channels (its
BERT of 336 million parameters) and 0.02 sqrt(1024 / h) for h, so that a layer does to the scale of its input what it does there; likewise the
learning rate, 1e-4 (1024 / h). AdamW, weight decay 0.01, gradients clipped at norm 1, warm-up over the first 0.5 % of the steps (10,000 of 2
million), then a linear decay to 0. No dropout: no sample is seen twice. "scaled" has the paper's weights of what is added to the stream, 1/sqrt(2 L)
smaller; "unscaled" does without, as BERT was published (Devlin et al. 2019, arXiv:1810.04805): figure 7 (a) is the published BERT.
"""

import math
import multiprocessing
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import packhorse
from packhorse.data.batches import training_samples
from packhorse.data.corpus import Corpus, load_corpus
from packhorse.data.masking import hide
from packhorse.models.bert import BERT
from packhorse.report.chart import line_chart
from packhorse.reproduce.claims import Claim

DEPTH, WIDTH, HEADS, SEQ_LEN, SAMPLES = 48, 64, 4, 64, 8
MASK, VOCAB = 256, 257  # bytes, and what hides them
INIT_STD, LEARNING_RATE, FOR_WIDTH, WARMUP = 0.02, 1e-4, 1024, 0.005
WEIGHT_DECAY, CLIP_NORM = 0.01, 1.0
INTO_STREAM = (".attention.out.weight", ".feed_forward.2.weight")
NAMES = {True: "pre-LN", False: "post-LN"}
PAPERS = "scaled"
RECIPES = {PAPERS: True, "unscaled": False}  # whether what is added to the stream starts smaller
GAP = 0.5  # nats
PARTS = 10  # of a run: losses are means over one


@dataclass(frozen=True)
class Trained:
    """One run. norms: of the gradients of each block at the start, from the first on. losses: of each step, in nats a hidden byte."""

    recipe: str
    pre_norm: bool
    seed: int
    norms: tuple[float, ...]
    losses: tuple[float, ...]

    def parts(self) -> list[float]:
        """Mean losses of the tenths of the run."""
        steps = len(self.losses)
        return [statistics.fmean(self.losses[k * steps // PARTS : (k + 1) * steps // PARTS]) for k in range(PARTS)]


def make(recipe: str, pre_norm: bool, seed: int, depth: int = DEPTH) -> BERT:
    """The model at its start. recipe: of RECIPES."""
    torch.manual_seed(seed)
    model = BERT(vocab=VOCAB, layers=depth, width=WIDTH, heads=HEADS, seq_len=SEQ_LEN, dropout=0.0, pre_norm=pre_norm)
    std = INIT_STD * math.sqrt(FOR_WIDTH / WIDTH)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            smaller = math.sqrt(2 * depth) if RECIPES[recipe] and name.endswith(INTO_STREAM) else 1.0
            nn.init.normal_(parameter, std=std / smaller)
    return model


def batch_of(corpus: Corpus, seed: int, step: int) -> dict[str, Tensor]:
    """SAMPLES samples with some bytes hidden, others at every step and for every seed."""
    first = step * SAMPLES
    ids, labels = training_samples(corpus, order="random", seed=seed, first=first, count=SAMPLES, global_batch_size=SAMPLES, seq_len=SEQ_LEN)
    hidden, wanted = hide(ids, labels, seed=seed, first=first, mask_token=MASK, vocab=MASK)
    return {"ids": torch.from_numpy(hidden), "labels": torch.from_numpy(wanted)}


def learning_rate(step: int, steps: int) -> float:
    """Of a step, counted from 0."""
    peak, warmup = LEARNING_RATE * FOR_WIDTH / WIDTH, max(1, round(WARMUP * steps))
    return peak * min((step + 1) / warmup, (steps - step) / (steps - warmup + 1))


def block_norms(model: BERT, batch: dict[str, Tensor]) -> tuple[float, ...]:
    """The 2-norm of the gradients of each block, by plain PyTorch."""
    model.zero_grad()
    model(**batch).backward()
    norms = tuple(math.sqrt(sum(p.grad.double().square().sum().item() for p in block.parameters() if p.grad is not None)) for block in model.blocks)
    model.zero_grad()
    return norms


def train(corpus: Corpus, recipe: str, pre_norm: bool, seed: int, steps: int, depth: int = DEPTH) -> Trained:
    """One run from its start to its end."""
    model = make(recipe, pre_norm, seed, depth)
    norms = block_norms(model, batch_of(corpus, seed, 0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=WEIGHT_DECAY, fused=True)
    step = packhorse.compile(model, packhorse.plan(model, batch_of(corpus, seed, 0), optimizer=optimizer, clip_norm=CLIP_NORM))
    losses = []
    for number in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(number, steps)
        losses.append(step(batch_of(corpus, seed, number)).item())
    return Trained(recipe, pre_norm, seed, norms, tuple(losses))


def runs(steps: int, seeds: tuple[int, ...], recipes: Sequence[str] = (PAPERS,), jobs: int = 1, depth: int = DEPTH) -> Iterator[Trained]:
    """Both places of the norms, for each recipe and seed; jobs: so many runs at once, each in a process of its own with one thread."""
    asked = [(recipe, pre_norm, seed, steps, depth) for recipe in recipes for seed in seeds for pre_norm in NAMES]
    if jobs == 1:
        yield from map(_run, asked)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_run, asked)


def _run(asked: tuple[str, bool, int, int, int]) -> Trained:
    torch.set_num_threads(1)
    return train(load_corpus("stdlib"), *asked)


def medians(found: list[Trained], pre_norm: bool) -> list[float]:
    """Over the seeds of one recipe, of the mean losses of the tenths of the run."""
    return [statistics.median(parts) for parts in zip(*(run.parts() for run in found if run.pre_norm == pre_norm))]


def norm_medians(found: list[Trained], pre_norm: bool) -> list[float]:
    """Over the seeds of one recipe, of the gradient norms of the blocks."""
    return [statistics.median(norms) for norms in zip(*(run.norms for run in found if run.pre_norm == pre_norm))]


def spread(norms: list[float]) -> float:
    """The largest over the smallest."""
    return max(norms) / min(norms)


def _by_recipe(found: list[Trained]) -> dict[str, list[Trained]]:
    return {recipe: [run for run in found if run.recipe == recipe] for recipe in dict.fromkeys(run.recipe for run in found)}


def claims(found: list[Trained]) -> Iterator[Claim]:
    """What the paper says, and our aim."""
    for recipe, mine in _by_recipe(found).items():
        pre, post = medians(mine, True), medians(mine, False)
        seeds, depth, steps = len({run.seed for run in mine}), len(mine[0].norms), len(mine[0].losses)
        where = f"depth {depth}, {recipe}"
        text = ", ".join(f"{name} {spread(norm_medians(mine, kind)):.1f}" for kind, name in NAMES.items())
        yield Claim(f"{where}: gradient norms of blocks at the start, largest over smallest", "", text, None)
        gaps = [after - before for before, after in zip(pre, post)]
        least = min(gaps[PARTS // 2 :])
        text = f"{pre[-1]:.3f} and {post[-1]:.3f} nats in the last tenth of {steps} steps; in the second half at least {least:+.3f}"
        yield Claim(f"{where}: pre-LN and post-LN, median of {seeds} seeds", f"(b) trains lower; {GAP} nat apart (our aim)", text, least >= GAP)
        ends = {(run.pre_norm, run.seed): run.parts()[-1] for run in mine}
        lower = sum(ends[True, seed] < ends[False, seed] for before, seed in ends if before)
        yield Claim(f"{where}: pre-LN ends lower", "(b) trains lower", f"for {lower} of {seeds} seeds", lower == seeds)


def table(found: list[Trained]) -> str:
    """Markdown tables: norms of gradients over blocks, losses over steps."""
    depth, steps = len(found[0].norms), len(found[0].losses)
    shown = sorted({round(part * (depth - 1) / 6) for part in range(7)})
    lines = [
        f"BERT, {depth} blocks, {WIDTH} channels, {HEADS} heads; {SAMPLES} samples of {SEQ_LEN} bytes of the standard "
        "library's source a step, 15 % hidden.",
        "",
        "Norm of a block's gradients at the start, median over seeds:",
        "",
        "| block | " + " | ".join(str(block + 1) for block in shown) + " | largest over smallest |",
        "|---" * (2 + len(shown)) + "|",
    ]
    for recipe, mine in _by_recipe(found).items():
        for kind, name in NAMES.items():
            norms = norm_medians(mine, kind)
            lines.append(f"| {recipe}, {name} | " + " | ".join(f"{norms[block]:.3f}" for block in shown) + f" | {spread(norms):.1f} |")
    ends = [(k + 1) * steps // PARTS for k in range(PARTS)]
    lines += [
        "",
        "Mean loss of a tenth of the run, in nats a hidden byte:",
        "",
        "| up to step | " + " | ".join(map(str, ends)) + " |",
        "|---" * (1 + PARTS) + "|",
    ]
    for recipe, mine in _by_recipe(found).items():
        for kind, name in NAMES.items():
            lines.append(f"| {recipe}, {name}, **median** | " + " | ".join(f"{loss:.3f}" for loss in medians(mine, kind)) + " |")
            lines += [f"| seed {run.seed} | " + " | ".join(f"{loss:.3f}" for loss in run.parts()) + " |" for run in mine if run.pre_norm == kind]
    return "\n".join(lines)


def picture(found: list[Trained]) -> str:
    """Median losses over steps as SVG."""
    steps, lines = len(found[0].losses), {}
    for recipe, mine in _by_recipe(found).items():
        for kind, name in NAMES.items():
            lines[f"{name}, {recipe}"] = [((k + 1) * steps // PARTS, loss) for k, loss in enumerate(medians(mine, kind))]
    return line_chart(
        lines, x_label="step", y_label="loss, nats a hidden byte", title=f"BERT, {len(found[0].norms)} blocks: where the layer norms stand"
    )
