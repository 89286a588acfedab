"""A cover of each full matrix of `packhorse bench equality`: in some case, any two factors have any two of their values at once."""

import itertools
from dataclasses import replace

from packhorse.bench.equality_cases import FACTORS, WAYS, Case, every_case, every_mesh_case
from packhorse.bench.equality_models import WORDY

STAGES = FACTORS["stage"]
# stages whose bits are compared with each other
BESIDE_EACH_OTHER = [
    *(Case("GPT", 2, stage, 1, True, False) for stage in STAGES),
    *(Case("GPT", 2, stage, 3, False, False) for stage in STAGES),
    *(Case("ResNet, group norm", 3, stage, 3, True, False) for stage in STAGES),
    *(Case("Llama, untied", 4, stage, 1, False, False) for stage in STAGES[1:3]),
]

SINGLE = [
    Case("BERT", 2, 3, 1, True, False, "float32"),
    Case("GPT", 2, 2, 3, True, False, "float32"),
    Case("Llama, tied", 3, 1, 1, True, False, "float32"),
]


def pairs_of(case: Case) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every two factors with the values that the case gives them. One rank has no stages: with it nothing is known of a stage and something else."""
    values = [(name, getattr(case, name)) for name in FACTORS]
    pairs = set(itertools.combinations(values, 2))
    return {pair for pair in pairs if case.dp > 1 or "stage" not in dict(pair) or "dp" in dict(pair)}


def every_pair() -> set[tuple[tuple[str, object], tuple[str, object]]]:
    return {((a, x), (b, y)) for a, b in itertools.combinations(FACTORS, 2) for x, y in itertools.product(FACTORS[a], FACTORS[b])}


def cover() -> list[Case]:
    """The cases above, and then, as long as a pair is missing, the case that brings the most new pairs for what it costs."""
    everything = [(case, pairs_of(case)) for case in every_case()]
    return _covering(BESIDE_EACH_OTHER, everything, every_pair().difference(*(pairs_of(case) for case in BESIDE_EACH_OTHER)))


def _covering(chosen: list[Case], everything: list[tuple[Case, set]], missing: set) -> list[Case]:
    cases = list(chosen)
    while missing:
        best, brings = max(everything, key=lambda item: len(item[1] & missing) / (1 + _cost(item[0])))
        cases.append(best)
        missing = missing - brings
    return cases


def _cost(case: Case) -> float:
    """In new pairs, roughly: every rank plans for itself, and recomputation takes the longest to plan, with Hugging Face's large graphs above all."""
    large = case.tp > 1 and case.model.startswith(("Llama", "Qwen"))
    return 0.2 * case.mesh.world_size * (1 + large) * (1 + 2 * case.recompute * (1 + (case.micros > 1)))


# -- over tp ---------------------------------------------------------------------------------------------------------------------------------

BESIDE_EACH_OTHER_ON_A_MESH = [Case("GPT, 4 heads", 2, stage, 1, True, False, tp=2, sequence=True, layers=1) for stage in STAGES]
ON_A_MESH = [
    *BESIDE_EACH_OTHER_ON_A_MESH,
    *(replace(case, layers=1) for case in every_mesh_case() if case.steps > 3 or (case.model == WORDY and case.tp == 2)),
    Case("Llama, 4 heads, untied", 1, 0, 1, True, True, tp=2, layers=1),
    Case("GPT, 4 heads", 2, 3, 2, False, True, tp=2, layers=1),
    Case("Qwen3", 1, 0, 2, True, False, tp=4, sequence=True, layers=1),
    Case("Llama, 4 heads, tied", 1, 0, 1, False, False, tp=4, layers=1),
    Case("GPT-2", 1, 0, 2, True, False, tp=2, layers=1),
]
SINGLE_ON_A_MESH = [
    Case("Llama, 4 heads, tied", 1, 0, 2, True, False, "float32", tp=2, sequence=True, layers=1),
    Case("BERT, 4 heads", 1, 0, 1, True, False, "float32", tp=2, layers=1),
]


def values_of(case: Case) -> dict[str, object]:
    """Factor -> the value that the case gives it. One dp rank has no stages."""
    way = next(name for name, fields in WAYS.items() if all(getattr(case, field) == fields.get(field, False) for field in ("recompute", "sequence")))
    stage = {"stage": case.stage} if case.dp > 1 else {}
    return {name: getattr(case, name) for name in ("model", "tp", "dp", "micros", "clip")} | stage | {"way": way}
