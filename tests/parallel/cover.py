"""A cover of each full matrix of `packhorse bench equality`: in some case, any two factors have any two of their values at once."""

import itertools
from dataclasses import replace

from packhorse.bench.equality_cases import FACTORS, MESH_FACTORS, WAYS, Case, every_case, every_mesh_case
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

RANKS = 4  # of the largest job
STAGES_OF: dict[str, tuple[int, ...]] = {"plain": (), "recompute": (3,), "sequence": STAGES}
BESIDE_EACH_OTHER_ON_A_MESH = [Case("GPT, 4 heads", 2, stage, 1, True, False, tp=2, sequence=True, layers=1) for stage in STAGES]
ON_A_MESH = [
    *BESIDE_EACH_OTHER_ON_A_MESH,
    *(replace(case, layers=1) for case in every_mesh_case() if case.steps > 3 or (case.model == WORDY and case.tp == 2)),
    Case("Llama, 4 heads, untied", 1, 0, 1, True, True, tp=2, layers=1),
    Case("GPT, 4 heads", 2, 3, 2, False, True, tp=2, layers=1),
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


def mesh_pairs_of(case: Case) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    """Every two factors of which one is tp or the way; what the others are together with each other, the cover over dp has. Not a model and
    recomputation, which sees no more of the model than the graph that the tensor pass gives."""
    pairs = {pair for pair in itertools.combinations(values_of(case).items(), 2) if {"tp", "way"} & {name for name, _ in pair}}
    return pairs - {(("model", case.model), ("way", "recompute"))}


def some_mesh_cases() -> list[Case]:
    """The full matrix with tp, up to RANKS ranks, of one block. With several dp ranks too: sequences split at every stage, and recomputation at the
    last one, which gathers and reduces anew."""
    found = []
    for values in itertools.product(*MESH_FACTORS.values()):
        fields = dict(zip(MESH_FACTORS, values))
        way = fields.pop("way")
        case = Case(**(fields | WAYS[way]), layers=1)
        if case.tp > 1 and case.mesh.world_size <= RANKS and (case.stage in STAGES_OF[way] if case.dp > 1 else case.stage == 0):
            found.append(case)
    return found


def mesh_cover() -> list[Case]:
    everything = [(case, mesh_pairs_of(case)) for case in some_mesh_cases()]
    missing = set().union(*(pairs for _, pairs in everything)).difference(*(mesh_pairs_of(case) for case in ON_A_MESH))
    return _covering(ON_A_MESH, everything, missing)
