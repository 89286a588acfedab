"""A plan as the compact JSON that the page draws from: columns of numbers, and tables of the words they point into. No torch."""

import json
from collections import Counter
from typing import Any

from packhorse.planning.budget import budget_bytes
from packhorse.planning.plan import GraphPlan, Plan
from packhorse.report.bands import persistent_bands
from packhorse.report.kinds import KINDS, original, stays


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page's script needs, JSON-able. Bytes and times are integers.

    words     operators, modules, lines and phases, each once
    kinds     names of the kinds that `kind` points into
    programs  name, repeats (how often a step runs it), end (number of nodes), and columns:
              nodes   op, phase, module, source (indices into words), one entry a node
              stays   name, node, lower, upper, size, offset (-1 if external), kind, again (how often it is made again), copy (0: the original)
    """
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    programs = [_program(name, planned, word, plan.times(name)) for name, planned in plan.programs.items()]
    return {
        "peak": plan.peak_bytes,
        "budget": budget_bytes(plan.options.budget, plan.keep_everything_bytes),
        "persistent": [[name, num_bytes] for name, num_bytes in persistent_bands(plan.persistent).items()],
        "kinds": list(KINDS),
        "programs": programs,
        "words": list(words),
    }


def _program(name: str, planned: GraphPlan, word, repeats: int) -> dict[str, Any]:
    nodes, found = planned.graph.nodes, stays(planned)
    makings: Counter[str] = Counter()
    copies: dict[str, int] = {}  # root -> which making of its original it is, 0 for the first
    for root in (v.name for node in nodes for v in node.outputs if v is not None and v.base is None):
        copies[root] = makings[original(root)]
        makings[original(root)] += 1
    return {
        "name": name,
        "repeats": repeats,
        "end": max(len(nodes), 1),
        "nodes": {
            "op": [word(node.op) for node in nodes],
            "phase": [word(node.phase) for node in nodes],
            "module": [word(node.module) for node in nodes],
            "source": [word(node.source) for node in nodes],
        },
        "stays": {
            "name": [stay.name for stay in found],
            "node": [stay.node for stay in found],
            "lower": [stay.lower for stay in found],
            "upper": [stay.upper for stay in found],
            "size": [stay.size for stay in found],
            "offset": [-1 if stay.offset is None else stay.offset for stay in found],
            "kind": [KINDS.index(stay.kind) for stay in found],
            "again": [max(makings[original(stay.name)] - 1, 0) for stay in found],
            "copy": [copies.get(stay.name, 0) for stay in found],
        },
    }


def script_safe(data: Any) -> str:
    """Compact JSON that may stand in a `<script>` element: no `<`, `>` or `&` is left, whatever names the user has given."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
