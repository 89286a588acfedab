"""`packhorse bench zoo [NAME ...]`: every architecture of the zoo captured, planned, and run for three steps beside plain PyTorch with dropout on.

For each: whether losses and all gradients are bit-equal, whether memory was what the plan said, and the arena and what kernels allocate
against eager's peak of intermediates (torch.profiler's memory events, gradients kept allocated in both). An architecture that cannot be
captured shows module, line and reason. Words after `zoo` pick architectures by a part of their name or family.
"""

import argparse
import copy
import difflib
import json
import statistics
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import packhorse
from packhorse.bench.architectures import Architecture, architectures
from packhorse.bench.rivals import loss_of
from packhorse.bench.step import write_between
from packhorse.errors import UserError
from packhorse.runtime.allocator import AllocatorWatch

BEGIN, END = "<!-- bench zoo: begin -->", "<!-- bench zoo: end -->"
NUM_STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """What became of one architecture. status: "bit-equal", "differs", "refused", "fails in PyTorch"; reason: of all but the first.

    arena_ratio, memory_ratio: arena, and arena plus adopted tensors, over eager's peak of intermediates. exact: measured bytes are as predicted.
    """

    name: str
    family: str
    status: str
    reason: str = ""
    nodes: int = 0
    exact: bool = False
    arena_ratio: float | None = None
    memory_ratio: float | None = None


def attempt(architecture: Architecture, seed: int = 0) -> Outcome:
    """Runs one architecture both ways from the same weights and random state."""
    name, family = architecture.name, architecture.family
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch = architecture.make().train(), architecture.batch()
        mine = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def eager() -> float:
            optimizer.zero_grad(set_to_none=False)
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            return loss.item()

        state = torch.get_rng_state()
        try:
            losses = [eager() for _ in range(NUM_STEPS)]
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            return Outcome(name, family, "fails in PyTorch", str(error).strip().splitlines()[0])
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        try:
            plan = packhorse.plan(mine, batch, optimizer=torch.optim.AdamW(mine.parameters(), lr=1e-3), recompute="none")
        except UserError as error:
            return Outcome(name, family, "refused", str(error).split("; a plan must hold")[0].split("; run the model once")[0])
        step = packhorse.compile(mine, plan)
        torch.set_rng_state(state)
        found = [step(batch).item() for _ in range(NUM_STEPS)]
        with AllocatorWatch(torch.device("cpu")) as watch:
            eager()
    ledger, grads = step.ledger(), step.grads()
    wrong = [n for n in gradients if not torch.equal(gradients[n], grads[n])]
    return Outcome(
        name,
        family,
        "bit-equal" if found == losses and not wrong else "differs",
        "" if found == losses and not wrong else f"losses {found} against {losses}; gradients that differ: {', '.join(wrong[:3]) or 'none'}",
        len(plan.programs["first"].graph.nodes),
        ledger.measured_peak_bytes == ledger.predicted_peak_bytes,
        plan.arena_bytes / watch.peak_bytes,
        (plan.arena_bytes + plan.external_bytes) / watch.peak_bytes,
    )


def render(outcomes: list[Outcome]) -> str:
    """A summary and a table in Markdown."""
    equal = [o for o in outcomes if o.status == "bit-equal"]
    lines = [
        f"{len(equal)} of {len(outcomes)} architectures captured, planned and run with losses and all gradients bit-equal to plain PyTorch over "
        f"{NUM_STEPS} steps, dropout on; memory as predicted in {sum(o.exact for o in equal)} of them."
    ]
    for what, ratios in (("Arena", [o.arena_ratio for o in equal]), ("Arena and adopted tensors", [o.memory_ratio for o in equal])):
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            lines.append(f"{what} over eager's peak of intermediates: median {statistics.median(known):.3f}, largest {max(known):.3f}.")
    lines += ["", "| architecture | family | | nodes | arena / eager | with adopted / eager |", "|---|---|---|---|---|---|"]
    for o in outcomes:
        columns = " | ".join("" if ratio is None else f"{ratio:.3f}" for ratio in (o.arena_ratio, o.memory_ratio))
        said = o.status if not o.reason else f"{o.status}: {o.reason}".replace("|", "\\|")
        lines.append(f"| {o.name} | {o.family} | {said} | {o.nodes or ''} | {columns} |")
    return "\n".join(lines)


def _called(architecture: Architecture, name: str) -> bool:
    return name.lower() in f"{architecture.name} {architecture.family}".lower()


def _nearest(name: str, zoo: list[Architecture]) -> str:
    """In words, the architectures and families whose name, or its part before "For", is nearest."""
    words = {word.lower(): word for a in zoo for word in (a.family, a.name.split("For")[0], a.name)}
    close = difflib.get_close_matches(name.lower(), words, n=3)
    return f"; the nearest are {', '.join(words[word] for word in close)}" if close else ""


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if everything that was captured is bit-equal and exact, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names or families; all without any")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    try:
        import transformers
    except ImportError:
        raise UserError("bench zoo needs transformers, which is not installed; install the extra: pip install 'packhorse[hf]'") from None
    transformers.logging.set_verbosity_error()
    zoo = architectures()
    for name in asked.names:
        if not any(_called(a, name) for a in zoo):
            raise UserError(f"bench zoo: no architecture is called {name}{_nearest(name, zoo)}; without a name all {len(zoo)} are run")
    chosen = [a for a in zoo if not asked.names or any(_called(a, name) for name in asked.names)]
    if asked.write:
        write_between(asked.write, BEGIN, END, None)
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for architecture in chosen:
        outcomes.append(attempt(architecture))
        if not as_json:
            print(f"{outcomes[-1].name}: {outcomes[-1].status}", flush=True)
    found: dict[str, Any] = {"architectures": [asdict(o) for o in outcomes]}
    print(json.dumps(found) if as_json else "\n" + render(outcomes))
    if asked.write:
        write_between(asked.write, BEGIN, END, render(outcomes))
    return int(any(o.status == "differs" or (o.status == "bit-equal" and not o.exact) for o in outcomes))
