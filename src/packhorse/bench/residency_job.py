"""One rank of a job of `packhorse bench residency`: one model on one mesh, at several budgets.

Started by torchrun with a JSON object as its argument: model, a name of WORKLOADS; layers and samples of a rank, where they are not those of this
file; device: a device file with a host link; rooms: shares of the room (see `budget_of`); rounds; out: the file that rank 0 writes a list of dicts of
the fields of Cell into.
"""

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import packhorse
from packhorse.bench.jobs import end_job
from packhorse.errors import BudgetError
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.planning.plan import Plan
from packhorse.runtime.step import Step

LAYERS, SAMPLES, WIDTH, HEADS, TOKENS, VOCAB = 6, 8, 256, 8, 64, 256
HOST_BUDGET = "30%"
JOINT = "joint"
WAYS: dict[str, dict[str, Any]] = {
    "recompute only": {"residency": "keep"},
    "offload only": {"recompute": "none", "host_budget": HOST_BUDGET},
    "ZeRO-3 and blocks": {"recompute": "blocks", "residency": "keep"},
    JOINT: {"host_budget": HOST_BUDGET},
}
WARM_UP = 1
HOPELESS = 1.05  # a budget that is so far below the least plan of a way is not tried: the error costs a search for what would fit


@dataclass(frozen=True)
class Ran:
    """A way in a cell. fits: there is a plan within the budget. predicted_s, and bytes: of the rank with the most. exact: peak, bytes on the host and
    bytes sent were the predicted ones, on every rank in every step; equal: losses and last gradients have the bits of keeping everything.
    seconds: of each round's step, of the slowest rank; cpu_seconds: CPU seconds of all ranks and threads, waiting left out. same_as: another way
    with the very same programs."""

    way: str
    fits: bool
    predicted_s: float = 0.0
    peak_bytes: int = 0
    host_bytes: int = 0
    exact: bool = False
    equal: bool = False
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    same_as: str = ""


@dataclass(frozen=True)
class Cell:
    """A budget of a model on a mesh. everything_bytes, everything_s: of the step that keeps everything; least_bytes: of recomputation alone."""

    model: str
    dp: int
    room: float
    budget_bytes: int
    everything_bytes: int
    everything_s: float
    least_bytes: int
    rans: list[Ran]


def budget_of(everything: int, least: int, room: float) -> int:
    """A share of the room between the least that recomputation alone can do and keeping everything, and that least."""
    return least + int((everything - least) * room)


def _gpt(layers: int) -> nn.Module:
    return GPT(vocab=VOCAB, layers=layers, width=WIDTH, heads=HEADS, seq_len=TOKENS)


def _bert(layers: int) -> nn.Module:
    return BERT(vocab=VOCAB, layers=layers, width=WIDTH, heads=HEADS, seq_len=TOKENS, dropout=0.0)


def _llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 8 // 3 // 32 * 32,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        num_hidden_layers=layers,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


WORKLOADS: dict[str, Callable[[int], nn.Module]] = {"GPT": _gpt, "BERT": _bert, "Llama": _llama}


def batch_of(model: str, samples: int, rank: int) -> dict[str, Tensor]:
    """A rank's batch, the same in every step."""
    draw = torch.Generator().manual_seed(rank)
    ids, labels = (torch.randint(0, VOCAB, (samples, TOKENS), generator=draw) for _ in range(2))
    return {"input_ids" if model == "Llama" else "ids": ids, "labels": labels}


class Rank:
    """One rank's part of a job."""

    def __init__(self, asked: dict[str, Any]):
        self.asked, self.rank, self.ranks = asked, dist.get_rank(), dist.get_world_size()
        self.layers = asked.get("layers", LAYERS)
        self.batch = batch_of(asked["model"], asked.get("samples", SAMPLES), self.rank)

    def planned(self, **how: Any) -> tuple[nn.Module, Plan] | None:
        """A plan, and the model it is of; None if it does not fit on some rank."""
        torch.manual_seed(0)
        model = WORKLOADS[self.asked["model"]](self.layers).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        mesh, found = packhorse.Mesh(dp=self.ranks), None
        try:
            stage = 3 if self.ranks > 1 else 0
            plan = packhorse.plan(model, self.batch, optimizer=optimizer, mesh=mesh, zero_stage=stage, device=self.asked["device"], **how)
            found = model, plan
        except BudgetError:
            pass
        return found if min(self.every(int(found is not None))) else None

    def every(self, own: Any) -> list[Any]:
        """What each rank has."""
        rows: list[Any] = [own] * self.ranks
        dist.all_gather_object(rows, own)
        return rows

    def least(self, **how: Any) -> int:
        """Peak of the leanest plan of a way, of the rank that needs most."""
        found = self.planned(budget="minimum", **how)
        assert found is not None
        return max(self.every(found[1].peak_bytes))

    def bits(self, step: Step) -> str:
        """Of as many steps as each way takes in a cell."""
        return digest([step(self.batch).item() for _ in range(WARM_UP + self.asked["rounds"])], step.grads())

    def cells(self) -> list[Cell]:
        kept = self.planned(recompute="none", residency="keep")
        assert kept is not None
        everything, everything_s = (max(self.every(figure)) for figure in (kept[1].peak_bytes, kept[1].seconds))
        wanted = self.bits(packhorse.compile(*kept))
        least = {way: self.least(**how) for way, how in WAYS.items() if way != JOINT}
        bytes_least = least["recompute only"]
        cells = []
        for room in self.asked["rooms"]:
            budget = budget_of(everything, bytes_least, room)
            found = {way: self.planned(budget=budget, **how) for way, how in WAYS.items() if least.get(way, 0) <= budget * HOPELESS}
            rans = self.run({way: pair for way, pair in found.items() if pair is not None}, wanted)
            cells.append(Cell(self.asked["model"], self.ranks, room, budget, everything, everything_s, bytes_least, rans))
        return cells

    def run(self, found: dict[str, tuple[nn.Module, Plan]], wanted: str) -> list[Ran]:
        """Every way's step once in each round, each round beginning with another one."""
        steps = {way: packhorse.compile(*pair) for way, pair in found.items()}
        losses: dict[str, list[float]] = {way: [] for way in steps}
        walls: dict[str, list[float]] = {way: [] for way in steps}
        cpus: dict[str, list[float]] = {way: [] for way in steps}
        exact = dict.fromkeys(steps, True)
        order = list(steps)
        for number in range(WARM_UP + self.asked["rounds"]):
            for way in order[number % len(order) :] + order[: number % len(order)]:
                dist.barrier()
                begin, cpu = time.perf_counter(), time.process_time()
                losses[way].append(steps[way](self.batch).item())
                walls[way].append(time.perf_counter() - begin)
                cpus[way].append(time.process_time() - cpu)
                exact[way] &= is_exact(steps[way])
        rans = []
        for way in WAYS:
            if way not in steps:
                rans.append(Ran(way, False))
                continue
            plan = found[way][1]
            equal = digest(losses[way], steps[way].grads()) == wanted
            mine = plan.seconds, plan.peak_bytes, plan.host_bytes, exact[way], equal, walls[way], cpus[way]
            predicted, peaks, hosts, exacts, equals, taken, used = zip(*self.every(mine))
            same = [other for other in found if other != way and found[other][1].programs == plan.programs]
            slowest = [max(of_ranks) for of_ranks in zip(*taken)][WARM_UP:]
            in_all = [sum(of_ranks) for of_ranks in zip(*used)][WARM_UP:]
            rans.append(Ran(way, True, max(predicted), max(peaks), max(hosts), all(exacts), all(equals), slowest, in_all, "".join(same[:1])))
        return rans


def is_exact(step: Step) -> bool:
    """The last step took and sent what its plan says."""
    plan, ledger = step.plan, step.ledger()
    measured = ledger.measured_peak_bytes, ledger.measured_host_bytes or 0, ledger.measured_comm_bytes or 0
    return measured == (plan.peak_bytes, plan.host_bytes, plan.comm_bytes) and not ledger.differences


def digest(losses: list[float], gradients: dict[str, Tensor]) -> str:
    """Of bits."""
    found = hashlib.sha256(json.dumps([loss.hex() for loss in losses]).encode())
    for name, tensor in sorted(gradients.items()):
        found.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(asked: dict[str, Any]) -> None:
    """Every rank runs it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cells = Rank(asked).cells()
    if dist.get_rank() == 0:
        Path(asked["out"]).write_text(json.dumps([asdict(cell) for cell in cells]))
    end_job()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
