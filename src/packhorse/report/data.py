"""A plan as the compact JSON that the page draws from: columns of numbers, and tables of the words they point into. No torch."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from packhorse.graph.ir import Graph, Node
from packhorse.graph.operators import is_copy
from packhorse.parallel.volume import sent_by
from packhorse.planning.budget import budget_bytes
from packhorse.planning.plan import GraphPlan, Plan
from packhorse.planning.step_seconds import timelines
from packhorse.planning.timeline import Timeline
from packhorse.planning.waiting import original
from packhorse.report.bands import persistent_bands
from packhorse.report.kinds import KINDS, ON_HOST, Stay, stays, stays_on_host


def page_data(plan: Plan) -> dict[str, Any]:
    """What the page's script needs, JSON-able. Bytes and times are integers.

    words     operators, modules, lines and phases, each once
    kinds     names of the kinds that `kind` points into
    programs  name, repeats (how often a step runs it), end (number of nodes), and columns:
              nodes   op, phase, module, source (indices into words), one entry a node
              stays   name, node, lower, upper, size, offset (-1 if external), kind, again (how often it is made again), copy (0: the original)
              pool    the same of what lies on the host
              line    positions (when the computation comes to each node, and the end) and what runs beside it: stream (index into streams), name,
                      node, begin, end, bytes. All in nanoseconds from the beginning of the program
    """
    lines = timelines(plan)
    streams = list(dict.fromkeys(event.stream for line in lines.values() for event in line.events))
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    programs = [
        _program(name, planned, word, plan.times(name)) | {"line": _line(planned, lines[name], streams)} for name, planned in plan.programs.items()
    ]
    return {
        "peak": plan.peak_bytes,
        "budget": budget_bytes(plan.options.budget, plan.keep_everything_bytes),
        "persistent": [[name, num_bytes] for name, num_bytes in persistent_bands(plan.persistent).items()],
        "kinds": [*KINDS, ON_HOST],
        "streams": streams,
        "host": plan.host_bytes,
        "programs": programs,
        "words": list(words),
    }


def _program(name: str, planned: GraphPlan, word, repeats: int) -> dict[str, Any]:
    nodes = planned.graph.nodes
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
        "stays": _columns(stays(planned), makings, copies),
        "pool": _columns(stays_on_host(planned), makings, copies),
    }


def _columns(found: list[Stay], makings: Mapping[str, int], copies: Mapping[str, int]) -> dict[str, list]:
    kinds = (*KINDS, ON_HOST)
    return {
        "name": [stay.name for stay in found],
        "node": [stay.node for stay in found],
        "lower": [stay.lower for stay in found],
        "upper": [stay.upper for stay in found],
        "size": [stay.size for stay in found],
        "offset": [-1 if stay.offset is None else stay.offset for stay in found],
        "kind": [kinds.index(stay.kind) for stay in found],
        "again": [max(makings[original(stay.name)] - 1, 0) for stay in found],
        "copy": [copies.get(stay.name, 0) for stay in found],
    }


def _line(planned: GraphPlan, line: Timeline, streams: list[str]) -> dict[str, list]:
    graph = planned.graph
    return {
        "positions": [round(second * 1e9) for second in (*(line.positions or (0.0,)), line.seconds)],
        "stream": [streams.index(event.stream) for event in line.events],
        "name": [event.name for event in line.events],
        "node": [event.node for event in line.events],
        "begin": [round(event.begin_s * 1e9) for event in line.events],
        "end": [round(event.end_s * 1e9) for event in line.events],
        "bytes": [_bytes(graph.nodes[event.node], graph) for event in line.events],
    }


def _bytes(node: Node, graph: Graph) -> int:
    """What this rank sends in a collective, or copies to or from the host."""
    return sum(out.extent_bytes for out in node.outputs if out is not None) if is_copy(node.op) else sent_by(node, graph)


def script_safe(data: Any) -> str:
    """Compact JSON that may stand in a `<script>` element: no `<`, `>` or `&` is left, whatever names the user has given."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
