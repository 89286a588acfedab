"""The bytes of an order, without making its graph: the liveness and in-place rules of planning/placement.py on integers.

It says what the layout will reach when nothing is lost to fragmentation, which the planner then checks on the real graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from packhorse.recompute.facts import ARENA, EXTERNAL, Facts
from packhorse.recompute.mirror import RANDOM_STATE_BYTES, Order
from packhorse.units import align_up

_STATE_BYTES = align_up(RANDOM_STATE_BYTES, 64)


@dataclass(frozen=True)
class Bytes:
    """arena, external: bytes alive while each item of the order runs."""

    arena: list[int]
    external: list[int]

    @property
    def peak(self) -> int:
        """Arena and external at their peaks, as a plan counts them."""
        return max(self.arena, default=0) + max(self.external, default=0)


def live_nodes(facts: Facts, order: Order) -> list[bool]:
    """Whether each item of the order is run: somebody reads what it makes, or it draws, or it is no forward node."""
    needed: list[int] = [0] * len(facts.names)  # 1: a later item reads the copy that is made before it
    alive = [False] * len(order)
    first: dict[int, int] = {}
    for position, node in enumerate(order):
        first.setdefault(node, position)
    for position in range(len(order) - 1, -1, -1):
        node = order[position]
        original = first[node] == position
        wanted = any(needed[s] for s in facts.makes[node]) or (original and (facts.draws[node] or any(s in facts.outputs for s in facts.makes[node])))
        if wanted or not facts.forward[node]:
            alive[position] = True
            for s in facts.makes[node]:
                needed[s] = 0
            for s in facts.reads[node]:
                needed[s] = 1
    return alive


def seconds_of(facts: Facts, order: Order, alive: list[bool] | None = None) -> float:
    """Seconds of all that runs."""
    alive = live_nodes(facts, order) if alive is None else alive
    return sum(facts.seconds[node] for node, lives in zip(order, alive) if lives)


def bytes_of(facts: Facts, order: Order, alive: list[bool] | None = None, held: Sequence[int] = ()) -> Bytes:
    """Bytes alive at each item of the order. held: storages that stay to the end, besides the graph's outputs.

    Storages that are read and not made by the order (in a part of a graph) are there from the beginning to their last reader.
    """
    alive = live_nodes(facts, order) if alive is None else alive
    sizes, space = facts.sizes, facts.space
    end = len(order)
    # copies: number -> storage; which copy each item reads and makes
    copy_of: dict[int, int] = {}
    storage: list[int] = []
    last: list[int] = []
    read: list[list[int]] = []
    made: list[list[int]] = []
    first_copy: dict[int, int] = {}
    states: dict[int, int] = {}  # random node -> position of its last mirror
    seen: set[int] = set()
    for position, node in enumerate(order):
        if not alive[position]:
            read.append([])
            made.append([])
            seen.add(node)
            continue
        reads = []
        for s in facts.reads[node]:
            copy = copy_of.get(s)
            if copy is None:
                copy = copy_of[s] = first_copy[s] = len(storage)
                storage.append(s)
                last.append(position)
            last[copy] = position
            reads.append(copy)
        makes = []
        for s in facts.makes[node]:
            copy = copy_of[s] = len(storage)
            first_copy.setdefault(s, copy)
            storage.append(s)
            last.append(position)
            makes.append(copy)
        if facts.draws[node] and node in seen:
            states[node] = position
        seen.add(node)
        read.append(reads)
        made.append(makes)
    for s in facts.held:
        if s in first_copy:
            last[first_copy[s]] = end
    for s in held:
        if s in copy_of:
            last[copy_of[s]] = end

    live = [0, 0]
    room: dict[int, tuple[int, int]] = {}  # copy -> (space, bytes) of what it lies in
    made_here = {copy for makes in made for copy in makes}
    for copy, s in enumerate(storage):
        if copy not in made_here:
            room[copy] = (space[s], sizes[s])
            live[space[s]] += sizes[s]
    arena, external = [], []
    freed_states = {position: node for node, position in states.items()}
    drawn: set[int] = set()
    for position, node in enumerate(order):
        if alive[position]:
            if node in states and node not in drawn:
                live[ARENA] += _STATE_BYTES
                drawn.add(node)
            taken = -1
            makes = made[position]
            if makes and facts.takes[node] and sizes[facts.makes[node][0]]:
                for copy in read[position]:
                    if storage[copy] in facts.takes[node] and last[copy] == position and sizes[storage[copy]]:
                        taken = copy
                        break
            for k, copy in enumerate(makes):
                s = storage[copy]
                if k == 0 and taken >= 0:
                    where, size = room.pop(taken)
                    bigger = max(size, sizes[s])
                    live[where] += bigger - size
                    room[copy] = (where, bigger)
                else:
                    room[copy] = (space[s], sizes[s])
                    live[space[s]] += sizes[s]
            arena.append(live[ARENA] + facts.scratch[node])
            external.append(live[EXTERNAL])
            for copy in (*read[position], *makes):
                if last[copy] == position and copy in room:
                    where, size = room.pop(copy)
                    live[where] -= size
            if position in freed_states:
                live[ARENA] -= _STATE_BYTES
        else:
            arena.append(live[ARENA])
            external.append(live[EXTERNAL])
    return Bytes(arena, external)
