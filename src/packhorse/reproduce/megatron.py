"""`packhorse reproduce megatron`: what Shoeybi et al. 2019 (arXiv:1909.08053) say of tensor parallelism and of where layer norms stand, checked on
this machine.

  counts   what tp ranks send each other, read off planned programs at tp 2, 4 and 8
  sizes    the models of table 1 planned as one rank of theirs would run them, on the meta device
  curves   one training run at tp 1, 2 and 4: its losses, its first weights
  scaling  weak and strong scaling over 1, 2 and 4 ranks, beside the paper's
  depth    BERT at depth 48 with layer norms before and after: gradients at the start, and losses
  local    all of these

"counts" and "sizes" start no process and allocate nothing. "curves" and "scaling" start ranks on this machine (torchrun, gloo). "depth" trains for
most of the time that it all takes (an hour or two of one core): --steps and --seeds make it shorter, --jobs has several runs at once.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from packhorse.errors import UserError
from packhorse.reproduce import megatron_counts, megatron_depth, megatron_ranks, megatron_sizes
from packhorse.reproduce.parts import Found, run_parts, say, told

DEGREES, QUICK_DEGREES = (2, 4, 8), (2,)  # of counts
RANKS, QUICK_RANKS = (1, 2, 4), (1, 2)  # of processes on this machine
QUICK_SIZES = ("megatron-1.2b",)
STEPS, QUICK_STEPS = 3000, 20  # of depth
CURVE_STEPS, QUICK_CURVE_STEPS, TIMED_STEPS, QUICK_TIMED_STEPS = 40, 5, 5, 2
SEEDS = 3


@dataclass(frozen=True)
class Asked:
    """quick: small sizes only. steps, seeds, recipes, jobs: of depth."""

    quick: bool
    steps: int
    seeds: int
    recipes: tuple[str, ...] = (megatron_depth.PAPERS,)
    jobs: int = 1


def _counts(asked: Asked) -> Found:
    found = list(told("counts", megatron_counts.counts(QUICK_DEGREES if asked.quick else DEGREES), lambda c: f"{c.model}, tp {c.ranks}, {c.how}"))
    figures = [{**asdict(c), "whole": [[op, phase, times] for (op, phase), times in c.whole.items()]} for c in found]
    return Found(list(megatron_counts.claims(found)), megatron_counts.table(found), figures, {})


def _sizes(asked: Asked) -> Found:
    names = QUICK_SIZES if asked.quick else tuple(megatron_sizes.TABLE)
    found = list(told("sizes", megatron_sizes.sizes(names), lambda p: f"{p.name}, tp {p.ranks}: {p.planning_s:.0f} CPU seconds"))
    return Found(list(megatron_sizes.claims(found)), megatron_sizes.table(found), [asdict(p) for p in found], {})


def _curves(asked: Asked) -> Found:
    jobs = megatron_ranks.curves(QUICK_RANKS if asked.quick else RANKS, QUICK_CURVE_STEPS if asked.quick else CURVE_STEPS)
    found = list(told("curves", jobs, lambda job: f"tp {job.ranks}, {job.micro_batches} micro-batches"))
    return Found(list(megatron_ranks.claims_of_curves(found)), megatron_ranks.table_of_curves(found), [asdict(job) for job in found], {})


def _scaling(asked: Asked) -> Found:
    say("scaling: running")
    found = megatron_ranks.scaling(QUICK_RANKS if asked.quick else RANKS, QUICK_TIMED_STEPS if asked.quick else TIMED_STEPS)
    figures = {name: [asdict(job) for job in jobs] for name, jobs in found.items()}
    return Found(list(megatron_ranks.claims_of_scaling(found)), megatron_ranks.table_of_scaling(found), figures, {})


def _depth(asked: Asked) -> Found:
    runs = megatron_depth.runs(asked.steps, tuple(range(asked.seeds)), asked.recipes, asked.jobs)
    found = list(told("depth", runs, lambda r: f"{r.recipe}, {megatron_depth.NAMES[r.pre_norm]}, seed {r.seed}: {r.parts()[-1]:.3f} nats"))
    pictures = {"megatron-depth.svg": megatron_depth.picture(found)}
    return Found(list(megatron_depth.claims(found)), megatron_depth.table(found), [asdict(run) for run in found], pictures)


PARTS: dict[str, Callable[[Asked], Found]] = {"counts": _counts, "sizes": _sizes, "curves": _curves, "scaling": _scaling, "depth": _depth}


def markers(part: str) -> tuple[str, str]:
    """The lines of a Markdown file between which a part is written."""
    return f"<!-- reproduce megatron {part}: begin -->", f"<!-- reproduce megatron {part}: end -->"


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every claim holds, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse reproduce megatron", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("local", *PARTS), default="local", help="a part, or all of them (default)")
    parser.add_argument("--quick", action="store_true", help="small sizes, few ranks, few steps")
    parser.add_argument("--steps", type=int, help=f"of each run of depth (default {STEPS})")
    parser.add_argument("--seeds", type=int, help=f"of depth (default {SEEDS})")
    parser.add_argument(
        "--recipes", nargs="+", choices=megatron_depth.RECIPES, default=[megatron_depth.PAPERS], help=f"of depth (default {megatron_depth.PAPERS})"
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs of depth at once, one thread each (default 1)")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="Markdown file whose tables of these parts are replaced; figures go beside it")
    given = parser.parse_args(arguments)
    steps, seeds = _number(given.steps, QUICK_STEPS if given.quick else STEPS), _number(given.seeds, 1 if given.quick else SEEDS)
    asked = Asked(given.quick, steps, seeds, tuple(dict.fromkeys(given.recipes)), given.jobs)
    if steps < megatron_depth.PARTS or seeds < 1 or asked.jobs < 1:
        raise UserError(
            f"reproduce megatron: --steps {steps} --seeds {seeds} --jobs {asked.jobs}: expected {megatron_depth.PARTS} or more steps, 1 or more "
            "seeds and jobs"
        )
    names = list(PARTS) if given.what == "local" else [given.what]
    torch.set_num_threads(1)
    return run_parts(names, lambda name: PARTS[name](asked), markers, given.write, as_json)


def _number(given: int | None, default: int) -> int:
    return default if given is None else given
