"""One of four ranks: small programs with collectives over every axis of a mesh, by hand.

Run by torchrun with a JSON object as its argument: {"out": file of rank 0}. What it finds, test_ranks.py judges.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packhorse.capture.update import norm_graph
from packhorse.errors import PeerError, UserError
from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value
from packhorse.graph.operators import ALL_REDUCE, WAIT
from packhorse.mesh import Mesh
from packhorse.parallel.part import part_of
from packhorse.parallel.partition import Partition
from packhorse.parallel.pieces import bucket_bytes
from packhorse.parallel.split import Sharding, Split
from packhorse.parallel.volume import sent_bytes
from packhorse.parallel.zero import Zero
from packhorse.planning.persistent import Persistent, Run, divided, like, make_run, shard_of
from packhorse.planning.plan import Options, plan_graph
from packhorse.program.lower import lower
from packhorse.runtime.arena import Arena
from packhorse.runtime.executor import BoundProgram
from packhorse.runtime.ranks import Ranks
from packhorse.runtime.storage import allocate, views

NUM = 10  # elements of what is summed
MESHES = {"dp 2, tp 2": Mesh(2, 2), "dp 4": Mesh(4, 1), "tp 4": Mesh(1, 4)}
SHAPES = {"a": (3, 5), "b": (7,), "w": (8, 6), "v": (5, 4)}
SPLITS = {"w": Split(0, (8,)), "v": Split(1, (4,))}
CLIP = 0.5


def numbers(name: str) -> Tensor:
    """The gradient of a parameter of SHAPES."""
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(ord(name)))


def ran(graph: Graph, persistent: Persistent, memory: dict[str, Tensor], ranks: Ranks) -> bool:
    """Runs a graph. Whether as many bytes were sent as its nodes say."""
    planned = plan_graph(graph, persistent, Options())
    before = ranks.sent_bytes
    BoundProgram(lower(planned), Arena(planned.arena_bytes, torch.device("cpu")), memory, [], None, ranks.axes).run({})
    return ranks.sent_bytes - before == sent_bytes(graph)


def sums(ranks: Ranks) -> dict[str, Any]:
    """Axis -> the sum over its ranks of [rank, rank, ...], all started before one is waited for; "exact": bytes sent."""
    inputs, starts, waits, outputs, runs = [], [], [], [], []
    for axis, transport in ranks.axes.items():
        given, total = Value(axis, "f32", (NUM,), (1,)), Value(f"sum.{axis}", "f32", (NUM,), (1,))
        shard = -(-NUM // transport.num_ranks)
        bucket = Value(f".bucket.{axis}", "u8", (bucket_bytes((0,), (NUM,), shard, transport.num_ranks, 4),), (1,))
        where = (("axis", axis), ("ranks", transport.num_ranks), ("rank", transport.rank), ("tag", f"sum {axis}"))
        inputs.append(Input(given, "grad", axis))
        starts.append(Node(f"{ALL_REDUCE}1", (Ref(axis),), (*where, ("offsets", (0,)), ("shard", shard)), (total, bucket)))
        waits.append(Node(WAIT, (Ref(total.name), Ref(bucket.name)), (("axis", axis), ("tag", f"sum {axis}")), ()))
        outputs.append(Output(total.name, "grad", axis))
        runs.append(make_run(f"grad.{axis}", "gradients", "grad", [(axis, given)]))
    persistent = Persistent(tuple(runs))
    memory = allocate(persistent, ranks.device)
    held = views(persistent, memory, "grad")
    for tensor in held.values():
        tensor.fill_(ranks.rank)
    exact = ran(Graph("sums", tuple(inputs), (*starts, *waits), tuple(outputs)), persistent, memory, ranks)
    return {"exact": exact, **{axis: tensor.tolist() for axis, tensor in held.items()}}


def runs_of(mesh: Mesh, rank: int, stage: int) -> list[Run]:
    """Parameters and gradients as this rank holds them: `a` and `b` whole, `w` and `v` cut over tp, all cut over dp as the stage says."""
    tp_rank = mesh.tp_rank(rank)
    parts = {n: part_of(SHAPES[n], (SHAPES[n][1], 1), split, mesh.tp, tp_rank) for n, split in SPLITS.items()} if mesh.tp > 1 else {}
    found = []
    for label, names in {"f32.g0.whole": "ab", "f32.g0.split": "wv"}.items():
        shapes = {n: parts[n].local_shape if n in parts else SHAPES[n] for n in names}
        values = [(n, Value(n, "f32", shape, (*shape[1:], 1))) for n, shape in shapes.items()]
        params = divided(make_run(f"param.{label}", "parameters", "param", values, parts=parts), mesh.dp, mesh.dp_rank(rank), 16)
        gradients = like(params, f"grad.{label}", "gradients", "grad")
        found += [params, shard_of(gradients) if stage >= 2 and mesh.dp > 1 else gradients]
    return found


def norm(ranks: Ranks, stage: int) -> dict[str, Any]:
    """The norm and the clip coefficient of gradients that lie over the ranks; "exact": bytes sent."""
    mesh, rank = ranks.mesh, ranks.rank
    scalar = Value("", "f32", (), ())
    metrics = make_run("metric.f32", "metrics", "metric", [(name, scalar) for name in ("grad_norm", "clip_coefficient")])
    persistent = Persistent((*runs_of(mesh, rank, stage), metrics))
    memory = allocate(persistent, ranks.device)
    for run in persistent.runs:
        for slot in run.slots if run.kind == "gradients" else ():
            whole = numbers(slot.target)
            if slot.part is not None:
                whole = whole.chunk(mesh.tp, SPLITS[slot.target].dim)[mesh.tp_rank(rank)]
            count = slot.value.num_elements
            piece = whole.reshape(-1)[slot.begin : slot.begin + count]
            memory[run.name][slot.offset : slot.offset + 4 * count].view(torch.float32).copy_(piece)
    sharding = Sharding(mesh.tp, mesh.tp_rank(rank), SPLITS) if mesh.tp > 1 else None
    zero = Zero(Partition(stage, mesh.dp, mesh.dp_rank(rank)), persistent, persistent, sharding)
    graph = norm_graph(torch.nn.Module(), persistent, CLIP, zero)
    assert graph is not None
    exact = ran(graph, persistent, memory, ranks)
    return {"exact": exact, **{name: tensor.item() for name, tensor in views(persistent, memory, "metric").items()}}


def same_batch(ranks: Ranks) -> str:
    """What is said where tp ranks have batches of their own."""
    ranks.greet(1, 7, ranks.mesh.dp_rank(ranks.rank))
    with suppress(UserError):
        ranks.greet(2, 7, ranks.rank)
        return "nothing"
    try:
        ranks.greet(2, 7, ranks.rank)
    except UserError as error:
        return str(error)
    return "nothing"


def one_fails(ranks: Ranks) -> str:
    """What this rank says where rank 3 fails, and the others wait: rank 2 for it over tp, rank 1 over dp, and rank 0 for rank 2. After this no
    collective works."""
    try:
        with ranks.board.telling():
            if ranks.rank == 3:
                raise ValueError("no room")
            ranks.all_gather(torch.ones(1), "rows", "dp" if ranks.rank < 2 else "tp")
    except (ValueError, PeerError) as error:
        return str(error)
    return "nothing"


def main() -> None:
    torch.set_num_threads(1)
    out, rank, found = json.loads(sys.argv[1])["out"], int(os.environ["RANK"]), {}
    for name, mesh in MESHES.items():
        ranks = Ranks(mesh, rank, torch.device("cpu"), purpose=name)
        found[name] = {
            "axes": {axis: transport.members for axis, transport in ranks.axes.items()},
            "transports": len(ranks.transports),
            "gathered": {axis: ranks.all_gather(torch.tensor([rank]), "ranks", axis).view(-1).tolist() for axis in ("world", "dp", "tp")},
            "sums": sums(ranks),
            "norms": {stage: norm(ranks, stage) for stage in range(4)},
        }
    ranks = Ranks(MESHES["dp 2, tp 2"], rank, torch.device("cpu"), purpose="mistakes")
    found |= {"same batch": same_batch(ranks), "one fails": one_fails(ranks)}
    store = dist.distributed_c10d._get_default_store()
    store.set(f"found {rank}", json.dumps(found))
    if not rank:
        Path(out).write_text(json.dumps([json.loads(store.get(f"found {r}")) for r in range(4)]))
    os._exit(0)  # collectives of the rank that failed are still under way, and nothing is to wait for them


if __name__ == "__main__":
    main()
