"""`packhorse bench equality`: training on several ranks beside plain PyTorch on one rank and the whole batch, two full matrices.

Over dp: {GPT, BERT, ResNet with group norm, Hugging Face Llama tied and untied} x ranks {1, 2, 3, 4} x stages of ZeRO {0, 1, 2, 3} x micro-batches
{1, 3} x clipping x recomputation {none, optimal in a budget}.
Over tp: {GPT, BERT, Hugging Face Llama tied and untied, Qwen3, GPT-2} x tp {1, 2, 4} x dp {1, 2} x stages {0, 1, 2, 3} x {plain, recomputing,
sequence parallel}, micro-batches {1, 2} and clipping alternating. And GPT-2's vocabulary.

In float64: losses, every gradient, norms and parameters of three steps, of two cases over tp of ten. Also whether the stages have the same bits,
whether what tp ranks have whole is the same on all of them, and memory and communication are as planned. Words after `equality` pick models by a part
of their name.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from packhorse.bench.equality_cases import Case, every_case, every_mesh_case
from packhorse.bench.equality_job import Outcome, walk
from packhorse.bench.equality_models import CUT_WORKLOADS, WORDY, WORKLOADS
from packhorse.bench.jobs import run_job
from packhorse.bench.step import write_between
from packhorse.errors import UserError
from packhorse.mesh import Mesh

MATRICES = {"dp": every_case, "tp": every_mesh_case}
MODELS = {"dp": [*WORKLOADS], "tp": [*CUT_WORKLOADS, WORDY]}
MARKS = {
    "dp": ("<!-- bench equality: begin -->", "<!-- bench equality: end -->"),
    "tp": ("<!-- bench equality over tp: begin -->", "<!-- bench equality over tp: end -->"),
}
BOUND = 1e-12  # of every difference, in float64
GRADS_BOUND = {"float64": BOUND, "float32": 1e-5}  # of a gradient's difference over the norm of all gradients
SECONDS_A_CASE, SECONDS_A_JOB = 10, 120  # and rank: all plan for themselves, on as many cores as there are


def outcomes_of(cases: Sequence[Case]) -> list[Outcome]:
    """Runs cases of one number of ranks, in one job; those of one rank in this process."""
    num_ranks = cases[0].mesh.world_size
    if num_ranks == 1:
        return walk(cases, 0)
    found = run_job(
        "packhorse.bench.equality_job",
        {"cases": [asdict(case) for case in cases]},
        num_ranks,
        seconds=SECONDS_A_JOB + SECONDS_A_CASE * len(cases) * num_ranks,
    )
    return [Outcome(**fields | {"case": Case(**fields["case"])}) for fields in found]


def is_equal(outcome: Outcome) -> bool:
    """All that was asked of one case. In float32 gradients alone have a bound: what an optimizer makes of their rounding has none."""
    small = max(outcome.loss, outcome.norm, outcome.params) <= BOUND or outcome.case.dtype == "float32"
    return not outcome.failure and small and outcome.grads <= GRADS_BOUND[outcome.case.dtype] and outcome.exact and outcome.alike


def unlike(outcomes: Iterable[Outcome]) -> list[tuple[Case, Case]]:
    """Cases that differ in nothing but the stage and have other bits. With several micro-batches stages 0 and 1 sum over them first, and 2 and 3
    over ranks first, so that only those pairs are compared."""
    first: dict[tuple, Outcome] = {}
    found = []
    for outcome in outcomes:
        case = outcome.case
        other = first.setdefault((replace(case, stage=0), case.dp > 1 and case.micros > 1 and case.stage > 1), outcome)
        if other.bits != outcome.bits:
            found.append((other.case, case))
    return found


def render(outcomes: list[Outcome], matrix: str = "dp") -> str:
    """A summary and a table in Markdown: a line for each model and number of ranks, or each model and mesh, with the worst of its cases."""
    good, other = sum(is_equal(o) for o in outcomes), unlike(outcomes)
    head, rule = {"dp": ("ranks", "---"), "tp": ("tp | dp", "---|---")}[matrix]
    lines = [
        f"{good} of {len(outcomes)} cases equal to plain PyTorch within {BOUND:g}, memory and communication as planned to the byte on every rank.",
        f"{len(other)} pairs of stages with other bits." if other else "Stages of one case have the same bits.",
        "",
        f"| model | {head} | cases | loss | gradients / norm | norm | parameters | as planned |",
        f"|---|{rule}|---|---|---|---|---|---|",
    ]
    table: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        case = outcome.case
        table[case.model, f"{case.dp}" if matrix == "dp" else f"{case.tp} | {case.dp}"].append(outcome)
    for (model, ranks), those in table.items():
        ran = [o for o in those if not o.failure]
        worst = " | ".join(f"{max((getattr(o, key) for o in ran), default=0.0):.1e}" for key in ("loss", "grads", "norm", "params"))
        lines.append(f"| {model} | {ranks} | {len(those)} | {worst} | {sum(o.exact for o in ran)} |")
    failed = [o for o in outcomes if not is_equal(o)]
    lines += [""] * bool(failed or other) + [f"- {_said(o.case)}: {o.failure or _wrong(o)}" for o in failed]
    lines += [f"- other bits: {_said(a)} and stage {b.stage}" for a, b in other]
    return "\n".join(lines)


def _wrong(outcome: Outcome) -> str:
    if not outcome.alike:
        return "tp ranks differ"
    return "differs" if outcome.exact else "not as planned"


def _said(case: Case) -> str:
    tp = f", tp {case.tp}" if case.tp > 1 else ""
    words = (case.clip, ", clipped"), (case.recompute, ", recomputing"), (case.sequence, ", sequence parallel")
    return f"{case.model}, dp {case.dp}{tp}, stage {case.stage}, micro-batches {case.micros}{''.join(word for is_so, word in words if is_so)}"


def run(arguments: list[str], *, as_json: bool) -> int:
    """The command. Exit code 0 if every case is equal and exact and the stages agree, else 1."""
    parser = argparse.ArgumentParser(prog="packhorse bench equality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of models' names; all without any")
    parser.add_argument("--over", choices=MATRICES, help="only the matrix over dp, or over tp")
    parser.add_argument("--ranks", type=int, help="only jobs of at most so many ranks")
    parser.add_argument("--write", type=Path, help="Markdown file whose tables are replaced")
    asked = parser.parse_args(arguments)
    matrices = [asked.over] if asked.over else [*MATRICES]
    models = [model for matrix in matrices for model in MODELS[matrix]]
    for name in asked.names:
        if not any(name.lower() in model.lower() for model in models):
            raise UserError(f"bench equality: no model is called {name}; the models are {'; '.join(models)}")
    for matrix in matrices if asked.write else ():
        write_between(asked.write, *MARKS[matrix], None)
    found = {matrix: _outcomes(matrix, asked.names, asked.ranks, quiet=as_json) for matrix in matrices}
    if as_json:
        print(json.dumps({"outcomes": [asdict(o) for outcomes in found.values() for o in outcomes]}))
    for matrix, outcomes in found.items():
        if outcomes and not as_json:
            print("\n" + render(outcomes, matrix))
        if outcomes and asked.write:
            write_between(asked.write, *MARKS[matrix], render(outcomes, matrix))
    return int(not all(all(is_equal(o) for o in outcomes) and not unlike(outcomes) for outcomes in found.values()))


def _outcomes(matrix: str, names: list[str], most_ranks: int | None, *, quiet: bool) -> list[Outcome]:
    """All cases of a matrix, those of one model and mesh in one job."""
    jobs: dict[tuple[str, Mesh], list[Case]] = defaultdict(list)
    for case in MATRICES[matrix]():
        if most_ranks is not None and case.mesh.world_size > most_ranks:
            continue
        if not names or any(name.lower() in case.model.lower() for name in names):
            jobs[case.model, case.mesh].append(case)
    outcomes: list[Outcome] = []
    for (model, mesh), cases in jobs.items():
        outcomes += outcomes_of(cases)
        if not quiet:
            print(f"{model}, {mesh.world_size} ranks: {sum(is_equal(o) for o in outcomes)} of {len(outcomes)} so far", flush=True)
    return outcomes
