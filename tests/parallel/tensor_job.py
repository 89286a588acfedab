"""One rank of a job of tensor parallel ranks, started by torchrun: cases of `packhorse bench equality`, and on two ranks what dropout draws, and
saved values that wait elsewhere.

Its argument is a JSON object: cases, dicts of the fields of Case; out: the file of rank 0. What it finds, test_tensor.py judges.
"""

import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import packhorse as ph
from packhorse.bench.equality_cases import Case, micro_batches, start
from packhorse.bench.equality_job import walk
from packhorse.bench.jobs import end_job
from packhorse.models.gpt import GPT
from packhorse.runtime.step import Step

TOKENS, WIDTH, STEPS = 8, 12, 2
PLACES = slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)  # of the sequence, where it is split
Found = dict[str, Any]


def gpt(dropout: float) -> nn.Module:
    torch.manual_seed(4)
    model = GPT(vocab=21, layers=1, width=WIDTH, heads=2, seq_len=TOKENS, dropout=dropout).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def with_two_heads_alike(dropout: float) -> nn.Module:
    """Both heads of the block, one a rank, do the same, as far as their masks are the same."""
    model = gpt(dropout)
    attention = model.blocks[0].attention
    with torch.no_grad():
        for tensor in (attention.qkv.weight.view(3, 2, WIDTH // 2, WIDTH), attention.qkv.bias.view(3, 2, WIDTH // 2)):
            tensor[:, 1] = tensor[:, 0]
        columns = attention.out.weight.view(WIDTH, 2, WIDTH // 2)
        columns[:, 1] = columns[:, 0]
    return model


def with_two_halves_alike(dropout: float) -> nn.Module:
    """A block that adds nothing, and the same position everywhere: with one token all over, the parts of the sequence do the same, as far as their
    masks are the same."""
    model = gpt(dropout)
    with torch.no_grad():
        model.positions.weight[:] = model.positions.weight[0]
        for last in (model.blocks[0].attention.out, model.blocks[0].feed_forward.out):
            last.weight.zero_(), last.bias.zero_()
    return model


def trained(model: nn.Module, steps: int, alike: bool = False, **options: Any) -> tuple[Found, Step, dict[str, Tensor]]:
    """(what became of it, the step, gradients of the last step). alike: all tokens of a batch are one."""
    torch.manual_seed(9)  # the streams start from here
    batch = {name: torch.randint(0, 21, (2, TOKENS)) for name in ("ids", "labels")}
    if alike:
        batch = {name: torch.full_like(tensor, 3) for name, tensor in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    step = ph.compile(model, ph.plan(model, batch, optimizer=optimizer, clip_norm=0.5, mesh=ph.Mesh(tp=2), **options))
    losses = [step(batch).item() for _ in range(steps)]
    ledger = step.ledger()
    exact = ledger.measured_peak_bytes == ledger.predicted_peak_bytes and ledger.measured_comm_bytes == step.plan.comm_bytes
    return {"losses": losses, "whole": whole_bits(step), "exact": exact}, step, step.grads()


def whole_bits(step: Step) -> list[str]:
    """Each rank's parameters and optimizer states that are not cut, as text."""
    pieces = {name: piece for name, piece in step.training_state()[0].items() if getattr(piece, "part", 0) is None}
    assert any(name.startswith("param/") for name in pieces) and any(name.startswith("state/") for name in pieces)
    return every(json.dumps({name: piece.held.tolist() for name, piece in sorted(pieces.items())}))


def every(own: Any) -> list:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


def masks_inside() -> Found:
    """Dropout of attention, one head a rank: how far apart the gradients of the two heads are, over their size."""
    found = {}
    for dropout in (0.0, 0.3):
        _, _, grads = trained(with_two_heads_alike(dropout), 1)
        heads = grads["blocks.0.attention.qkv.weight"].view(3, 2, -1)
        found[str(dropout)] = ((heads[:, 0] - heads[:, 1]).norm() / heads.norm()).item()
    return found


def masks_outside() -> Found:
    """Dropout on the sum of the embeddings: how far apart its gradients at the two halves of the sequence are, over their size."""
    found = {}
    for dropout in (0.0, 0.3):
        _, _, grads = trained(with_two_halves_alike(dropout), 1, alike=True, sequence_parallel=True)
        first, second = (grads["positions.weight"][places] for places in PLACES)
        found[str(dropout)] = ((first - second).norm() / first.norm()).item()
    return found


def recomputed(sequence: bool) -> Found:
    """Training with dropout, keeping everything and computing every block again: bits, and the modules that draw in the backward pass once more."""
    found: Found = {}
    for method in ("none", "blocks"):
        one, step, grads = trained(gpt(0.1), STEPS, sequence_parallel=sequence, recompute=method)
        again = [node for node in step.plan.programs["first"].graph.nodes if node.phase == "recompute"]
        draws = sorted({node.module for node in again if node.op == "aten.native_dropout.default"})
        grads, state = ({name: tensor.tolist() for name, tensor in tensors.items()} for tensors in (grads, step.state_dict()))
        found[method] = {**one, "grads": grads, "state": state, "draws": draws}
    return found


def overflow_on_one() -> Found:
    """fp16, a loss scale at which one gradient overflows: of the values of head 1, which rank 1 alone has. Which of the heads' are finite, what each
    rank does, how far parameters went, and what is left whole on each rank after a step with a smaller scale."""
    model = gpt(0.0).float()
    block = model.blocks[0]
    with torch.no_grad():
        block.attention.out.weight.view(WIDTH, 2, WIDTH // 2)[:, 1].mul_(8)
        block.norm_attention.weight.mul_(8)
    torch.manual_seed(9)
    batch = {name: torch.randint(0, 21, (2, TOKENS)) for name in ("ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = ph.compile(model, ph.plan(model, batch, optimizer=optimizer, clip_norm=0.5, precision="fp16", mesh=ph.Mesh(tp=2)))
    step.loss_scale.value = 2.0**16
    before, found = step.state_dict(), {"skipped": [], "scales": []}

    def moved() -> list[str]:
        return [name for name, tensor in step.state_dict().items() if not tensor.equal(before[name])]

    for place in range(2):
        step(batch)
        found["skipped"].append(every(step.last.skipped))
        found["scales"].append(every(step.loss_scale.value))
        if not place:
            values = step.grads()["blocks.0.attention.qkv.weight"].view(3, 2, -1).isfinite().all(-1)
            others = all(grad.isfinite().all() for name, grad in step.grads().items() if not name.endswith("qkv.weight"))
            found |= {"finite": values.tolist(), "others finite": others, "moved": moved()}
            step.loss_scale.value = 2.0**10
    return found | {"whole": whole_bits(step), "moved after": moved()}


def waited(name: str, residency: str) -> Found:
    """Training with saved values that wait where `residency` says: bits, whether bytes were as planned, and the bytes and copies of the plan."""
    case = Case(name, 1, 0, 1, clip=True, recompute=False, tp=2, dtype="float32")
    model, workload = start(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [micro_batches(case, number)[0][0] for number in range(STEPS)]
    plan = ph.plan(
        model, batches[0], optimizer=optimizer, loss=workload.loss, clip_norm=0.5, mesh=case.mesh, recompute="none", residency=residency,
        host_budget="1GiB" if residency == "offload" else None,
    )  # fmt: skip
    step = ph.compile(model, plan)
    losses = [step(batch).item() for batch in batches]
    ledger = step.ledger()
    exact = (ledger.measured_peak_bytes, ledger.measured_host_bytes, ledger.measured_comm_bytes) == (
        plan.peak_bytes,
        plan.host_bytes,
        plan.comm_bytes,
    )
    ops = [node.op for node in plan.programs["first"].graph.nodes]
    bits = [losses, *({key: tensor.tolist() for key, tensor in tensors.items()} for tensors in (step.grads(), step.state_dict()))]
    return {"bits": bits, "exact": every(exact), "arena": plan.arena_bytes, "host": plan.host_bytes, "sent": plan.comm_bytes, "ops": ops}


RESIDENCIES = ("keep", "shard", "offload")
WAITING = ("BERT, 4 heads", "Llama, 4 heads, tied")
DROPOUT: dict[str, Callable[[], Found]] = {
    "inside": masks_inside,
    "outside": masks_outside,
    "recomputed": lambda: recomputed(False),
    "recomputed, sequence": lambda: recomputed(True),
}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    found: Found = {"outcomes": [asdict(outcome) for outcome in walk([Case(**fields) for fields in asked["cases"]], dist.get_rank())]}
    if dist.get_world_size() == 2:
        found["dropout"] = {name: run() for name, run in DROPOUT.items()}
        found["overflow"] = overflow_on_one()
        found["waiting"] = {model: {where: waited(model, where) for where in RESIDENCIES} for model in WAITING}
    if not dist.get_rank():
        Path(asked["out"]).write_text(json.dumps(found))
    end_job()


if __name__ == "__main__":
    main()
