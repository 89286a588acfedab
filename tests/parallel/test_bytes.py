"""What a rank holds and sends, planned without processes, against ZeRO's formulas (Rajbhandari et al. 2019, sections 5, 7) and counts of elements."""

from collections import Counter

import pytest
import torch
from torch import nn

import packhorse as ph
from packhorse.graph.operators import ALL_GATHER
from packhorse.models.gpt import GPT
from packhorse.units import align_up

pytestmark = pytest.mark.cpu
SIDE, DEPTH, ROWS = 256, 3, 4  # SIDE * SIDE elements a unit are 32 * 2048: no padding on up to 2048 ranks
PSI = DEPTH * SIDE * SIDE
GREETING, LOSS, NORM = 16, 4, 4  # bytes to each other rank, besides gathers and reductions

# kind -> bytes a parameter; ZeRO, section 3.1: with Adam in mixed precision K = 4 + 4 + 4
WIDTHS = {
    "16-bit gradients": ({"precision": "bf16"}, {"parameters": 2, "gradients": 2, "master weights": 4, "optimizer states": 8}),
    "fp32 gradients": (
        {"precision": "bf16", "grad_dtype": torch.float32},
        {"parameters": 2, "gradients": 4, "master weights": 4, "optimizer states": 8},
    ),
    "fp32": ({}, {"parameters": 4, "gradients": 4, "optimizer states": 8}),
}
SHARDED_FROM = {"parameters": 3, "gradients": 2, "master weights": 1, "optimizer states": 1}


class Square(nn.Module):
    def __init__(self, depth=DEPTH):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(SIDE, SIDE, bias=False) for _ in range(depth))

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return x.square().mean()


def plan_of(model, batch, dp, rank, stage, **options):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return ph.plan(model, batch, optimizer=optimizer, mesh=ph.Mesh(dp=dp), rank=rank, zero_stage=stage, clip_norm=1.0, recompute="none", **options)


def square(dp, rank, stage, depth=DEPTH, **options):
    with torch.device("meta"):
        model = Square(depth)
    return plan_of(model, {"x": torch.empty(ROWS, SIDE, device="meta")}, dp, rank, stage, **options)


def held(plan):
    """kind -> bytes of its runs, without the count of steps that Adam keeps of every parameter."""
    table = Counter()
    for run in plan.persistent.runs:
        table[run.kind] += run.num_bytes if not run.name.startswith("step.") else 0
    return {kind: table[kind] for kind in SHARDED_FROM if table[kind]}


def formula(widths, psi, dp, stage):
    return {kind: size * psi // (dp if dp > 1 and stage >= SHARDED_FROM[kind] else 1) for kind, size in widths.items()}


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dp", [1, 4, 16, 64, 1024])
def test_a_rank_holds_what_the_paper_says(dp, widths):
    options, sizes = WIDTHS[widths]
    for stage, rank in [(0, 0), (1, dp - 1), (2, dp // 2), (3, dp - 1)] if dp > 1 else [(3, 0)]:
        plan = square(dp, rank, stage, **options)
        assert held(plan) == formula(sizes, PSI, dp, stage), (stage, rank)
        assert plan.persistent_bytes == sum(plan.persistent.bytes_by_kind().values())


def test_the_papers_own_words():
    """16 Psi, 4 Psi + 12 Psi / N, 2 Psi + 14 Psi / N, 16 Psi / N (table 1)."""
    sizes, n = WIDTHS["16-bit gradients"][1], 64
    totals = [sum(formula(sizes, PSI, n, stage).values()) for stage in range(4)]
    assert totals == [16 * PSI, 4 * PSI + 12 * PSI // n, 2 * PSI + 14 * PSI // n, 16 * PSI // n]


# -- with padding ------------------------------------------------------------------------------------------------------------------------

VOCAB, WIDTH, LAYERS, TOKENS = 37, 12, 2, 9


def gpt_units(model):
    """The tensors of each unit, in order: what the same block uses. The embedding of tokens is the head's too."""
    units = {}
    for name, parameter in model.named_parameters():
        units.setdefault(".".join(name.split(".")[: 2 if name.startswith("blocks.") else 1]), []).append(parameter.numel())
    return list(units.values())


def places(unit, dp, step):
    """(first element of each tensor, elements of the run) of a unit whose tensors begin at multiples of `step`, cut into dp shards of such."""
    offsets, end = [], 0
    for numel in unit:
        offsets.append(end)
        end = align_up(end + numel, step)
    return offsets, align_up(end, dp * step)


def gpt(dp, rank, stage, **options):
    with torch.device("meta"):
        model = GPT(vocab=VOCAB, layers=LAYERS, width=WIDTH, heads=2, seq_len=TOKENS)
    batch = {name: torch.empty(2, TOKENS, dtype=torch.int64, device="meta") for name in ("ids", "labels")}
    return model, plan_of(model, batch, dp, rank, stage, **options)


@pytest.mark.parametrize(
    "dp, rank, stage, widths",
    [(4, 3, 0, "fp32"), (4, 1, 1, "16-bit gradients"), (3, 2, 2, "fp32 gradients"), (16, 15, 3, "16-bit gradients"), (1024, 1000, 3, "fp32")],
)
def test_units_are_padded_to_whole_lines_of_64_bytes(dp, rank, stage, widths):
    options, sizes = WIDTHS[widths]
    model, plan = gpt(dp, rank, stage, **options)
    step = 64 // min(sizes.values())
    padded = sum(places(unit, dp, step)[1] for unit in gpt_units(model))
    assert held(plan) == formula(sizes, padded, dp, stage)
    assert plan.persistent.bytes_by_kind()["padding"] == plan.persistent_bytes - sum(
        slot.value.extent_bytes for run in plan.persistent.runs for slot in run.slots
    )


def test_every_element_is_in_one_shard():
    """Of 16-bit copies, master weights and states; and gradients of what is trained."""
    pieces = Counter()
    for rank in range(3):
        model, plan = gpt(3, rank, 3, precision="bf16")
        for kind, num_bytes in plan.persistent.bytes_by_kind().items():
            pieces[kind] += num_bytes
    psi = sum(p.numel() for p in model.parameters())
    counts = 4 * 3 * len(list(model.parameters()))  # every rank counts the steps of every parameter
    assert {k: pieces[k] for k in SHARDED_FROM} == {
        "parameters": 2 * psi, "gradients": 2 * psi, "master weights": 4 * psi, "optimizer states": 8 * psi + counts,
    }  # fmt: skip


# -- communication -----------------------------------------------------------------------------------------------------------------------


def gathers_of(plan, micros):
    """Unit -> gathers of its parameters in a step; by the nodes that start one."""
    count = Counter()
    for name, planned in plan.programs.items():
        for node in planned.graph.nodes:
            tag = str(dict(node.kwargs).get("tag", ""))
            if node.op.startswith("packhorse.all_gather.") and tag.startswith("gather param."):
                count[tag.split()[1]] += 1 if name in ("first", "last") else micros - 1
    return count


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("dp", [2, 3, 64])
def test_volume(dp, micros):
    """ZeRO, section 7: 2 Psi at stages 0 and 1; with a micro-batches (a + 1) Psi at 2, and at 3 each gather once and a Psi; (N - 1) / N of it."""
    psi_u = SIDE * SIDE
    besides = (GREETING + LOSS + NORM) * (dp - 1)

    def share(psi):
        """Bytes, where shards are not padded; else those of the rank with the last shard, which is the padded one."""
        return 4 * psi * (dp - 1) // dp

    if psi_u % (16 * dp):
        return _padded_volume(dp, micros, besides)
    for stage, psi in ((0, 2 * PSI), (1, 2 * PSI), (2, (micros + 1) * PSI)):
        assert square(dp, 1, stage, num_micro_batches=micros).comm_bytes == share(psi) + besides, stage
    plan = square(dp, 1, 3, num_micro_batches=micros)
    gathers = gathers_of(plan, micros)
    assert len(gathers) == DEPTH and all(micros <= n <= 2 * micros for n in gathers.values())
    assert plan.comm_bytes == share((sum(gathers.values()) + micros * DEPTH) * psi_u) + besides


def _padded_volume(dp, micros, besides):
    """Reductions send what lies in others' shards, gathers whole shards: counted element by element."""
    for rank in range(dp):
        _, run = places([SIDE * SIDE], dp, 16)
        shard = run // dp
        own = max(0, min(SIDE * SIDE, (rank + 1) * shard) - rank * shard)
        scattered, gathered = 4 * (SIDE * SIDE - own) * DEPTH, 4 * shard * (dp - 1) * DEPTH
        of_sums = 4 * own * (dp - 1) * DEPTH
        assert square(dp, rank, 0, num_micro_batches=micros).comm_bytes == scattered + of_sums + besides
        assert square(dp, rank, 1, num_micro_batches=micros).comm_bytes == scattered + gathered + besides
        assert square(dp, rank, 2, num_micro_batches=micros).comm_bytes == micros * scattered + gathered + besides


@pytest.mark.parametrize("rank", range(3))
def test_volume_of_many_tensors_in_a_unit(rank):
    """A GPT on 3 ranks, where tensors lie across the borders of shards."""
    model, plan = gpt(3, rank, 2, num_micro_batches=2)
    scattered = gathered = 0
    for unit in gpt_units(model):
        offsets, run = places(unit, 3, 16)
        owner = [r for r in range(3) for _ in range(run // 3)]
        scattered += sum(owner[o + k] != rank for o, n in zip(offsets, unit) for k in range(n))
        gathered += 2 * run // 3
    assert plan.comm_bytes == 4 * (2 * scattered + gathered) + 2 * (GREETING + LOSS + NORM)


@pytest.mark.parametrize("device", ["cpu", "a100-80"])
def test_a_budget_pays_for_parameters_that_stay_whole(device):
    """Six units, the first of which the backward pass does not read: without a budget two are whole at a time, and the last two of the forward pass
    are not gathered again; with room for four more each is gathered once, and a step is no slower; with none, no more than fit beside gradients."""

    def gathers(plan):
        return sum(node.op == ALL_GATHER and "shard" in str(node.args) for node in plan.programs["first"].graph.nodes)

    unit = SIDE * SIDE * 4
    free = square(2, 0, 3, 6, device=device)
    roomy, tight = (square(2, 0, 3, 6, device=device, budget=free.peak_bytes + more) for more in (4 * unit, 0))
    assert [gathers(plan) for plan in (free, roomy)] == [6 + 3, 6] and 6 < gathers(tight) <= 6 + 3
    assert tight.peak_bytes <= free.peak_bytes
    assert roomy.comm_bytes == free.comm_bytes - 3 * unit // 2
    assert roomy.seconds <= free.seconds and free.peak_bytes < roomy.peak_bytes <= free.peak_bytes + 4 * unit
