"""`packhorse bench equality`: training on several ranks beside plain PyTorch on one rank and the whole batch, the full matrix.

{GPT, BERT, ResNet with group norm, Hugging Face Llama tied and untied} x ranks {1, 2, 3, 4} x stages of ZeRO {0, 1, 2, 3} x micro-batches {1, 3} x
clipping x recomputation {none, optimal in a budget}, in float64: losses, every gradient, norms and parameters of three steps.
Also whether the stages have the same bits, and memory and communication are as planned. Words after `equality` pick models by a part of their name.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from packhorse.bench.equality_cases import FACTORS, WORKLOADS, Case, every_case
from packhorse.bench.equality_job import Outcome, walk
from packhorse.bench.jobs import run_job
from packhorse.bench.step import write_between
from packhorse.errors import UserError

BEGIN, END = "<!-- bench equality: begin -->", "<!-- bench equality: end -->"
BOUND = 1e-12  # of every difference, in float64
GRADS_BOUND = {"float64": BOUND, "float32": 1e-5}  # of a gradient's difference over the norm of all gradients
SECONDS_A_CASE, SECONDS_A_JOB = 20, 60


def outcomes_of(cases: Sequence[Case]) -> list[Outcome]:
    """Runs cases of one number of ranks, in one job; those of one rank in this process."""
    if cases[0].dp == 1:
        return walk(cases, 0)
    found = run_job(
        "packhorse.bench.equality_job",
        {"cases": [asdict(case) for case in cases]},
        cases[0].dp,
        seconds=SECONDS_A_JOB + SECONDS_A_CASE * len(cases),
    )
    return [Outcome(**fields | {"case": Case(**fields["case"])}) for fields in found]


def is_equal(outcome: Outcome) -> bool:
    """All that was asked of one case. In float32 gradients alone have a bound: what an optimizer makes of their rounding has none."""
    small = max(outcome.loss, outcome.norm, outcome.params) <= BOUND or outcome.case.dtype == "float32"
    return not outcome.failure and small and outcome.grads <= GRADS_BOUND[outcome.case.dtype] and outcome.exact


def unlike(outcomes: Iterable[Outcome]) -> list[tuple[Case, Case]]:
    """Cases that differ in nothing but the stage and have other bits. With several micro-batches stages 0 and 1 sum over them first, and 2 and 3
    over ranks first, so that only those pairs are compared."""
    first: dict[tuple, Outcome] = {}
    found = []
    for outcome in outcomes:
        case = outcome.case
        key = (case.model, case.dp, case.micros, case.clip, case.recompute, case.dtype, case.dp > 1 and case.micros > 1 and case.stage > 1)
        other = first.setdefault(key, outcome)
        if other.bits != outcome.bits:
            found.append((other.case, case))
    return found


def render(outcomes: list[Outcome]) -> str:
    """A summary and a table in Markdown: a line for each model and number of ranks, with the worst of its cases."""
    good, other = sum(is_equal(o) for o in outcomes), unlike(outcomes)
    lines = [
        f"{good} of {len(outcomes)} cases equal to plain PyTorch within {BOUND:g}, memory and communication as planned to the byte on every rank.",
        f"{len(other)} pairs of stages with other bits." if other else "Stages of one case have the same bits.",
        "",
        "| model | ranks | cases | loss | gradients / norm | norm | parameters | as planned |",
        "|---|---|---|---|---|---|---|---|",
    ]
    table: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        table[outcome.case.model, outcome.case.dp].append(outcome)
    for (model, dp), those in table.items():
        ran = [o for o in those if not o.failure]
        worst = " | ".join(f"{max((getattr(o, key) for o in ran), default=0.0):.1e}" for key in ("loss", "grads", "norm", "params"))
        lines.append(f"| {model} | {dp} | {len(those)} | {worst} | {sum(o.exact for o in ran)} |")
    failed = [o for o in outcomes if not is_equal(o)]
    lines += [""] * bool(failed or other) + [f"- {_said(o.case)}: {o.failure or 'differs'}" for o in failed]
    lines += [f"- other bits: {_said(a)} and stage {b.stage}" for a, b in other]
    return "\n".join(lines)


def _said(case: Case) -> str:
    recompute = ", recomputing" if case.recompute else ""
    return f"{case.model}, dp {case.dp}, stage {case.stage}, micro-batches {case.micros}{', clipped' if case.clip else ''}{recompute}"


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every case is equal and exact and the stages agree, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench equality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of models' names; all without any")
    parser.add_argument("--write", type=Path, help="Markdown file whose table is replaced")
    asked = parser.parse_args(arguments)
    for name in asked.names:
        if not any(name.lower() in model.lower() for model in WORKLOADS):
            raise UserError(f"bench equality: no model is called {name}; the models are {'; '.join(WORKLOADS)}")
    if asked.write:
        write_between(asked.write, BEGIN, END, None)
    outcomes: list[Outcome] = []
    for model in WORKLOADS:
        if asked.names and not any(name.lower() in model.lower() for name in asked.names):
            continue
        for dp in FACTORS["dp"]:
            outcomes += outcomes_of([case for case in every_case() if (case.model, case.dp) == (model, dp)])
            if not as_json:
                print(f"{model}, {dp} ranks: {sum(is_equal(o) for o in outcomes)} of {len(outcomes)} so far", flush=True)
    print(json.dumps({"outcomes": [asdict(o) for o in outcomes]}) if as_json else "\n" + render(outcomes))
    if asked.write:
        write_between(asked.write, BEGIN, END, render(outcomes))
    return int(not all(is_equal(o) for o in outcomes) or bool(unlike(outcomes)))
