"""One rank of a job of `packhorse bench equality`: walks over cases of one number of ranks. Started by torchrun with a JSON object as its argument.

The object: cases, each a dict of the fields of Case; out: the file that rank 0 writes a list of dicts of the fields of Outcome into.
"""

import hashlib
import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import packhorse
from packhorse.bench.equality_cases import Case, micro_batches, start, whole_batch
from packhorse.bench.equality_models import Batch, Loss
from packhorse.bench.jobs import end_job
from packhorse.runtime.held import Piece
from packhorse.runtime.step import Step

CLIP_NORM = 0.5
HOST_BUDGET = "1GiB"
# eps well above the rounding of gradients that are zero (those of the biases of keys), which Adam would take to full size
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}


@dataclass(frozen=True)
class Outcome:
    """What became of a case, against plain PyTorch on one rank and the whole batch.

    loss, norm, params: the largest absolute difference of any step's loss and norm, and of a parameter after the last step. grads: of a gradient of
    any step, the largest difference over the norm of all gradients. bits: a digest of losses, gradients, norms and parameters. exact: measured
    bytes are the predicted ones, peak, host and communication, on every rank in every step. recomputed: calls. failure: why there is nothing else.
    alike: after the last step, parameters and optimizer states that are whole on tp ranks have the same bits on all of them, and the padding of a
    vocabulary is zero in all of its.
    """

    case: Case
    loss: float = 0.0
    grads: float = 0.0
    norm: float = 0.0
    params: float = 0.0
    bits: str = ""
    exact: bool = False
    recomputed: int = 0
    failure: str = ""
    alike: bool = False


@dataclass
class Plain:
    """Steps of plain PyTorch. The norm is of the gradients before clipping."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def value_of(model: torch.nn.Module, batch: Batch, loss: Loss | None) -> Tensor:
    """The loss of a batch."""
    output = model(**batch)
    return output if loss is None else loss(output, batch)


@lru_cache(maxsize=4)
def plain(case: Case) -> Plain:
    """One rank, the whole batch at once. case: without stage and recomputation, which it does not know."""
    model, workload = start(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    found = Plain()
    for number in range(case.steps):
        optimizer.zero_grad()
        value = value_of(model, whole_batch(case, number), workload.loss)
        value.backward()
        found.losses.append(value.item())
        found.grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM if case.clip else float("inf")).item())
        optimizer.step()
    found.state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return found


def attempt(case: Case, rank: int) -> Outcome:
    """Every rank runs it; rank 0 has the answer."""
    model, workload = start(case)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    dp_rank = case.mesh.dp_rank(rank)
    plan = packhorse.plan(
        model,
        micro_batches(case, 0)[dp_rank] if case.micros > 1 else micro_batches(case, 0)[dp_rank][0],
        optimizer=optimizer,
        loss=workload.loss,
        clip_norm=CLIP_NORM if case.clip else None,
        num_micro_batches=case.micros,
        mesh=case.mesh,
        rank=rank,
        zero_stage=case.stage,
        recompute="optimal" if case.recompute else "none",
        budget=case.budget,
        sequence_parallel=case.sequence,
        optimizer_residency="offload" if case.on_host else "keep",
        host_budget=HOST_BUDGET if case.on_host else None,
    )
    step = packhorse.compile(model, plan)
    losses, norms, grads, exact = [], [], [], True
    for number in range(case.steps):
        micros = micro_batches(case, number)[dp_rank]
        losses.append(step(micros if case.micros > 1 else micros[0]).item())
        norms.append(step.last.grad_norm if step.last is not None else None)
        grads.append(step.grads())
        ledger = step.ledger()
        exact &= ledger.measured_peak_bytes == ledger.predicted_peak_bytes == plan.peak_bytes and not ledger.differences
        exact &= (ledger.measured_comm_bytes, ledger.measured_host_bytes) == (plan.comm_bytes, plan.host_bytes)
    state = step.state_dict()
    exact, alike = _everywhere(case, exact, *_held(step, case.mesh.tp_rank(rank)))
    if rank:
        return Outcome(case)
    wanted = plain(replace(case, stage=0, recompute=False, tp=1, sequence=False, on_host=False))
    return Outcome(
        case,
        max(abs(a - b) for a, b in zip(losses, wanted.losses)),
        max(apart(a, b) / norm for a, b, norm in zip(grads, wanted.grads, wanted.norms)),
        max((abs(a - b) for a, b in zip(norms, wanted.norms) if a is not None), default=0.0),
        apart(state, wanted.state),
        _digest([torch.tensor([x for x in (*losses, *norms) if x is not None]), *(t for g in grads for t in g.values()), *state.values()]),
        exact,
        sum(node.phase == "recompute" and not node.is_view for planned in plan.programs.values() for node in planned.graph.nodes),
        alike=alike,
    )


def _held(step: Step, tp_rank: int) -> tuple[str, bool]:
    """What a rank holds of parameters and optimizer states: (digest of those that are whole on all tp ranks, whether all padding is zero)."""
    whole, clean = [], True
    for name, piece in sorted(step.training_state()[0].items()):
        if not isinstance(piece, Piece):
            continue
        if piece.part is None:
            whole += [torch.tensor(list(name.encode())), piece.held]
            continue
        if piece.part.dim == 0 and piece.part.padding:
            rows = (piece.begin + torch.arange(len(piece.held))) // prod(piece.shape[1:])
            clean &= not piece.held[tp_rank * piece.part.width + rows >= piece.shape[0]].any()
    return _digest(whole), clean


def _everywhere(case: Case, exact: bool, digest: str, clean: bool) -> tuple[bool, bool]:
    """(exact, alike) of all ranks, from each one's own."""
    every: list[Any] = [(exact, digest, clean)] * case.mesh.world_size
    if case.mesh.world_size > 1:
        dist.all_gather_object(every, (exact, digest, clean))
    same = all(len({every[rank][1] for rank in group}) == 1 for group in case.mesh.groups("tp"))
    return all(one[0] for one in every), same and all(one[2] for one in every)


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of any element; infinity where names, dtypes or shapes are not the same."""
    if found.keys() != wanted.keys() or any((found[n].dtype, found[n].shape) != (wanted[n].dtype, wanted[n].shape) for n in found):
        return float("inf")
    return max((found[name] - wanted[name]).abs().max().item() for name in found)


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else str(tensor.item()).encode())
    return digest.hexdigest()


def walk(cases: Sequence[Case], rank: int) -> list[Outcome]:
    """Every rank runs it. What fails on all ranks alike is an outcome; what fails on one of them ends the job."""
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            try:
                outcomes.append(attempt(case, rank))
            except Exception as error:
                outcomes.append(Outcome(case, failure=f"{type(error).__name__}: {str(error).strip()[:500]}"))
    return outcomes


def main(asked: dict[str, Any]) -> None:
    """Every rank runs it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    outcomes = walk([Case(**fields) for fields in asked["cases"]], dist.get_rank())
    if dist.get_rank() == 0:
        Path(asked["out"]).write_text(json.dumps([asdict(outcome) for outcome in outcomes]))
    end_job()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
