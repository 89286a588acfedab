"""A cover of the full matrix of `packhorse bench equality`: in some case, any two factors have any two of their values at once."""

import itertools

from packhorse.bench.equality_cases import FACTORS, Case, every_case

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
    cases, missing = list(BESIDE_EACH_OTHER), every_pair().difference(*(pairs_of(case) for case in BESIDE_EACH_OTHER))
    everything = [(case, pairs_of(case)) for case in every_case()]
    while missing:
        best, brings = max(everything, key=lambda item: len(item[1] & missing) / (1 + _cost(item[0])))
        cases.append(best)
        missing -= brings
    return cases


def _cost(case: Case) -> float:
    """In new pairs, roughly: every rank plans for itself, and recomputation takes the longest to plan."""
    return 0.2 * case.dp * (1 + 2 * case.recompute * (1 + (case.micros > 1)))
