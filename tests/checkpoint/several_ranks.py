"""Jobs of several ranks for test_several_ranks.py, in one process that imports torch once and forks: `python several_ranks.py FOLDER` prints JSON.

A rank is a process forked off with what torchrun would set; who is to die is killed at a given point of a save by `kill -9`.
"""

import errno
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import torch
from torch import nn

import packhorse as ph
import packhorse.api  # here, so that no rank has to
import packhorse.checkpoint.write as writing
from packhorse.checkpoint import newest_checkpoint, prune_checkpoints
from packhorse.errors import CheckpointError, UserError
from packhorse.train.build import build_model, build_optimizer, build_plan, build_step
from packhorse.train.config_file import config_from_dict, format_config, load_config
from packhorse.train.task import named

STEPS, DYING = 4, 3  # steps of a run, and the one at whose save a rank dies


class Net(nn.Module):
    """Two blocks, a tied weight, a scalar, an empty, a frozen and an unused parameter, a channels-last convolution and buffers."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Linear(6, 12, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.scale, self.empty = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 3))
        self.frozen, self.unused = nn.Parameter(torch.randn(7), requires_grad=False), nn.Parameter(torch.randn(5))
        self.register_buffer("seen", torch.zeros(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + self.dropout(torch.tanh(block(hidden)))
        self.seen.add_(1)
        picture = self.conv(torch.cat([hidden, hidden], 1)[:, :18].reshape(-1, 2, 3, 3))
        return (hidden @ self.embed.weight - x).square().mean() * self.scale + picture.square().mean() + self.frozen.sum() * 0


def make(rank, world, stage, dropout, dtype, precision):
    torch.manual_seed(0)
    net = Net(dropout).to(dtype)
    weights, biases = ([p for name, p in net.named_parameters() if name.endswith("bias") is bias] for bias in (False, True))
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "lr": 0.02, "weight_decay": 0.0}], lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    plan = ph.plan(
        net,
        (batch(0, rank, world, dtype),),
        optimizer=optimizer,
        mesh=ph.Mesh(dp=world),
        rank=rank,
        zero_stage=stage,
        clip_norm=1.0,
        precision=precision,
    )
    step = ph.compile(net, plan, scheduler)
    torch.manual_seed(50 + rank)
    return step


def batch(number, rank, world, dtype):
    """This rank's rows of global batch `number`: 12 in all, at any number of ranks the same ones in the same order."""
    whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(1000 + number), dtype=torch.float64)
    return whole.chunk(world)[rank].to(dtype).clone()


def train(rank, world, folder, stage, steps, dropout, dying=None):
    """Resumes from what is in `folder`, and saves and prunes after every step."""
    step = make(rank, world, stage, dropout, torch.float64, "fp32")

    def note(*words):
        if not rank:
            with open(folder.with_suffix(".losses"), "a") as file:
                print(*words, file=file)

    newest = newest_checkpoint(folder, lambda text: None, ranks=step.ranks)
    start = ph.load(newest, step)["done"] if newest else 0
    note("start", start)
    for number in range(start, steps):
        loss = step((batch(number, rank, world, torch.float64),)).item()
        note(number + 1, loss.hex())
        if dying and number + 1 == DYING:
            die_at(*dying, rank, folder.with_suffix(".flag"))
        ph.save(folder / f"step-{number + 1}", step, {"done": number + 1})
        prune_checkpoints(folder, 2, ranks=step.ranks)


def die_at(point, victim, rank, flag):
    """Patches this process so that rank `victim` dies in the next save: at its own write or fsync, else when rank 0 comes to the point."""

    def die(*given):
        if rank != victim:
            flag.touch()
            time.sleep(0.3)  # in which the other one dies
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def half_written(path, content):
        if rank == victim:
            path.write_bytes(content[: len(content) // 2])
        die()

    def half_deleted(path, **more):
        if rank == victim:
            next(path.iterdir()).unlink()
        die()

    def watch():
        while not flag.exists():
            time.sleep(0.002)
        die()

    if point == "staging" and rank == victim:
        before(os, "write", lambda to, content: content.nbytes > 100 and (write(to, content[: content.nbytes // 2]), die()))
    elif point == "syncing" and rank == victim:
        before(os, "fsync", die)
    elif point == "manifest" and not rank:
        before(writing, "_write_file", half_written)
    elif point == "rename" and not rank:
        before(Path, "rename", lambda path, to: path.name.startswith(".staging") and die())
    elif point == "pruning" and not rank:
        before(shutil, "rmtree", lambda path, **more: path.name.startswith(".staging-step-1-") and half_deleted(path))
    elif rank == victim:
        threading.Thread(target=watch, daemon=True).start()


def before(owner, name, first):
    """Every call of owner.name calls `first` with the same arguments first."""
    real = getattr(owner, name)

    def patched(*given, **more):
        first(*given, **more)
        return real(*given, **more)

    setattr(owner, name, patched)


write = os.write


def job(world, work, *arguments):
    """Exit codes of the ranks of work(rank, world, *arguments); "hangs" for one that does not end, by itself, 20 s after another one has failed."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    children = [fork(rank, world, port, work, arguments) for rank in range(world)]
    codes, until = [None] * world, time.monotonic() + 120
    while None in codes and time.monotonic() < until:
        for rank in [rank for rank in range(world) if codes[rank] is None]:
            ended, status = os.waitpid(children[rank], os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                until = min(until, time.monotonic() + 20) if codes[rank] else until
        time.sleep(0.005)
    for rank in [rank for rank in range(world) if codes[rank] is None]:
        os.kill(children[rank], signal.SIGKILL)
        os.waitpid(children[rank], 0)
        codes[rank] = "hangs"
    return codes


def fork(rank, world, port, work, arguments):
    child = os.fork()
    if child:
        return child
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        work(rank, world, *arguments)
        code = 0
    except UserError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kills(root):
    """Point and victim -> exit codes of the broken and of the resumed job; "whole": the unbroken one's."""
    codes = {"whole": job(2, train, root / "whole", 3, STEPS, 0.1)}
    for index, (point, victim) in enumerate((point, victim) for point in POINTS for victim in (0, 1)):
        name, stage = f"{point}-{victim}", index % 4  # all stages have the same bits
        codes[name] = [job(2, train, root / name, stage, STEPS, 0.1, dying) for dying in ((point, victim), None)]
    return codes


POINTS = ("staging", "syncing", "manifest", "rename", "pruning")


def ranks_in_turn(root):
    """Exit codes of one run by 4, 2, 1 and 3 ranks at all stages, each for two steps, and of the same by one rank."""
    turns = [job(world, train, root / "turns", stage, 2 * (turn + 1), 0.0) for turn, (world, stage) in enumerate(TURNS)]
    return {"turns": turns, "alone": job(1, train, root / "alone", 0, 2 * len(TURNS), 0.0)}


TURNS = [(4, 3), (2, 1), (1, 0), (3, 2)]


def handed_on(root):
    """A state is saved, loaded and saved again at one (ranks, stage) after another: handed-0, handed-1, ... The next step's loss is noted."""
    return [job(world, hand_on, stage, root, place) for place, (world, stage) in enumerate(HANDS)]


HANDS = [(1, 0), (3, 3), (2, 1), (4, 2), (2, 0), (1, 0)]


def hand_on(rank, world, stage, root, place):
    step = make(rank, world, stage, 0.1, torch.float32, "bf16")
    if place:
        ph.load(root / f"handed-{place - 1}", step)
    else:
        for number in range(2):
            step((batch(number, rank, world, torch.float32),))
    ph.save(root / f"handed-{place}", step, {"place": place})
    loss = step((batch(2, rank, world, torch.float32),)).item()
    (root / f"handed-{place}.loss").write_text(loss.hex())


def over_tp(root):
    """A run of Hugging Face's Llama, whose state goes from mesh to mesh: loaded and saved again as tp-0, tp-1, ... The next step's loss is noted."""
    from transformers import LlamaConfig

    folder = root / "llama"
    folder.mkdir()
    config = LlamaConfig(**LLAMA)
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}))
    given = {"run": {"dir": str(folder)}, "model": {"kind": "hf", "config": str(folder / "config.json")}}
    (folder / "config.toml").write_text(format_config(config_from_dict(given | {"data": {"seq_len": 8}, "optimizer": {"clip_norm": 1.0}})))
    return [job(dp * tp, cut, folder, place, dp, tp, stage) for place, (dp, tp, stage) in enumerate(MESHES)]


# rows of the vocabulary that no degree divides; a head of keys for two of queries, so that ranks of tp 4 share one
LLAMA = {"vocab_size": 301, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MESHES = [(2, 2, 3), (1, 4, 0), (1, 1, 0), (2, 1, 2), (1, 2, 0)]  # dp, tp, stage


def cut(rank, world, folder, place, dp, tp, stage):
    words = [f"mesh.dp={dp}", f"mesh.tp={tp}", f"mesh.zero_stage={stage}", f"data.micro_batch_size={4 // dp}", "data.global_batch_size=4"]
    config = load_config(folder / "config.toml", words)
    torch.manual_seed(0)
    model = build_model(config)
    step = build_step(config, ph, model, build_plan(config, ph, model, build_optimizer(config, model), rank), None)
    torch.manual_seed(50 + rank // tp)

    def loss(number):
        ids = torch.randint(301, (4, 8), generator=torch.Generator().manual_seed(number)).chunk(dp)[rank // tp].clone()
        return step(named(config.model, ids, ids.clone())).item()

    if place:
        ph.load(folder / "checkpoints" / f"step-{place}", step)
    else:
        loss(0), loss(1)
    ph.save(folder / "checkpoints" / f"step-{place + 1}", step, {"steps_done": place + 1})
    (folder / f"{place}-{rank}.loss").write_text(loss(2).hex())


def full_disk(root):
    return job(2, fill_the_disk, root / "full")


def fill_the_disk(rank, world, folder):
    """The disk of rank 1 is full, then a value of rank 0's cannot be saved, then all is well. Every rank notes what it was told."""
    step, told = make(rank, world, 2, 0.1, torch.float64, "fp32"), []
    ph.save(folder / "step-1", step)

    def full(to, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    os.write = full if rank else write
    for extra in ({}, {"bad": object()} if not rank else {}):
        try:
            ph.save(folder / "step-2", step, extra)
        except CheckpointError as error:
            told.append(str(error))
        os.write = write
    left = sorted(path.name for path in folder.iterdir())
    ph.load(folder / "step-1", step)
    ph.save(folder / "step-2", step)
    folder.with_suffix(f".told-{rank}").write_text(json.dumps([told, left]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    print(json.dumps({work.__name__: work(out) for work in (kills, ranks_in_turn, handed_on, over_tp, full_disk)}))
