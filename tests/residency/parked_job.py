"""One rank of a job in which saved values wait as slices and on the host, started by torchrun.

Its argument is a JSON object: cases, dicts of the fields of Case; device: the path of a device file; out: the file of rank 0. What it finds,
test_on_ranks.py judges.
"""

import hashlib
import json
import sys
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import packhorse as ph
from packhorse.bench.jobs import end_job
from packhorse.graph.operators import OWN_SLICE, TO_HOST
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT

VOCAB, LAYERS, WIDTH, HEADS, TOKENS, STEPS = 61, 2, 20, 4, 9, 2  # sizes that leave some slices with padding


@dataclass(frozen=True)
class Case:
    """mesh: dp, tp; budget and host_budget as ph.plan takes them."""

    model: str
    dp: int
    tp: int
    stage: int
    residency: str = "keep"
    recompute: str = "none"
    budget: str | None = None
    host_budget: str | None = None


@dataclass(frozen=True)
class Found:
    """bits: a digest of losses, gradients and random states. exact: on all ranks measured peak, host bytes and sent bytes are the predicted ones.
    slices, copies, mirrors: nodes of the program."""

    case: Case
    bits: str
    exact: bool
    slices: int
    copies: int
    mirrors: int
    peak_bytes: int
    host_bytes: int


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name != "Llama":
        return {"GPT": GPT, "BERT": BERT}[name](vocab=VOCAB, layers=LAYERS, width=WIDTH, heads=HEADS, seq_len=TOKENS, dropout=0.1)
    import transformers

    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS // 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=VOCAB, use_cache=False))


def causal(output: Any, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), batch["input_ids"].flatten())


def attempt(case: Case, device: str) -> Found:
    """Every rank runs it; all have the answer."""
    model, mesh = model_of(case.model), ph.Mesh(dp=case.dp, tp=case.tp)
    ids = torch.randint(0, VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(mesh.dp_rank(dist.get_rank())))
    batch, loss = ({"input_ids": ids}, causal) if case.model == "Llama" else ({"ids": ids, "labels": ids}, None)
    options = {key: value for key, value in asdict(case).items() if key not in ("model", "dp", "tp", "stage")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = ph.plan(model, batch, optimizer=optimizer, loss=loss, clip_norm=1.0, mesh=mesh, zero_stage=case.stage, device=device, **options)
    torch.manual_seed(5)
    step = ph.compile(model, plan)
    exact, digest = True, hashlib.sha256()
    for _ in range(STEPS):
        digest.update(str(step(batch).item()).encode())
        ledger = step.ledger()
        exact &= (ledger.measured_peak_bytes, ledger.measured_host_bytes) == (plan.peak_bytes, plan.host_bytes)
        exact &= ledger.measured_comm_bytes == plan.comm_bytes and not ledger.differences
    for tensor in (*step.grads().values(), *step.training_state()[1].values()):
        digest.update(tensor.numpy().tobytes() if isinstance(tensor, torch.Tensor) else str(tensor).encode())
    nodes = plan.programs["first"].graph.nodes
    counts = [sum(node.op == op for node in nodes) for op in (OWN_SLICE, TO_HOST)]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (exact, plan.host_bytes, *counts))
    alike = len({own[1:] for own in told}) == 1  # all ranks park the same, and as much of it
    mirrors = sum(node.phase == "recompute" and not node.is_view for node in nodes)
    return Found(case, digest.hexdigest(), alike and all(own[0] for own in told), *counts, mirrors, plan.peak_bytes, plan.host_bytes)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    found = [asdict(attempt(Case(**fields), asked["device"])) for fields in asked["cases"]]
    if not dist.get_rank():
        Path(asked["out"]).write_text(json.dumps(found))
    end_job()


if __name__ == "__main__":
    main()
