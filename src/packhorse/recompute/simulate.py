"""The bytes of an order, without making its graph: the liveness and in-place rules of planning/placement.py on integers.

It says what the layout will reach when nothing is lost to fragmentation, which the planner then checks on the real graph.
"""

from collections.abc import Collection
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


def live_nodes(facts: Facts, order: Order, wanted: frozenset[int] = frozenset()) -> list[bool]:
    """Whether each item of the order is run: somebody reads what it makes, or it draws, or it is no forward node. wanted: storages read elsewhere."""
    needed = set(wanted)  # a later item reads the copy that is made before it
    alive = [False] * len(order)
    first: dict[int, int] = {}
    for position, node in enumerate(order):
        first.setdefault(node, position)
    for position in range(len(order) - 1, -1, -1):
        node = order[position]
        makes = facts.makes[node]
        original = first[node] == position
        if not facts.forward[node] or any(s in needed for s in makes) or (original and (facts.draws[node] or any(s in facts.outputs for s in makes))):
            alive[position] = True
            needed.difference_update(makes)
            needed.update(facts.reads[node])
    return alive


def seconds_of(facts: Facts, order: Order, alive: list[bool] | None = None) -> float:
    """Seconds of all that runs."""
    alive = live_nodes(facts, order) if alive is None else alive
    return sum(facts.seconds[node] for node, lives in zip(order, alive) if lives)


def bytes_of(facts: Facts, order: Order, alive: list[bool] | None = None, held: Collection[int] = (), free: Collection[int] = ()) -> Bytes:
    """Bytes alive at each item of the order. held: storages that stay to the end, besides the graph's outputs. free: storages that do not count.

    Storages that are read and not made by the order (in a part of a graph) are there from the beginning to their last reader.
    """
    alive = live_nodes(facts, order) if alive is None else alive
    sizes, space, end = facts.sizes, facts.space, len(order)
    copies = _copies(facts, order, alive, {*facts.held, *held} if held else facts.held)
    storage, last = copies.storage, copies.last
    live = [0, 0]
    room: dict[int, tuple[int, int]] = {}  # copy -> (space, bytes) of what it lies in
    for copy in copies.given:
        s = storage[copy]
        room[copy] = (space[s], 0 if s in free else sizes[s])
        live[space[s]] += room[copy][1]
    arena, external = [0] * end, [0] * end
    drawn: set[int] = set()
    for position, node in enumerate(order):
        if not alive[position]:
            arena[position], external[position] = live
            continue
        if node in copies.states and node not in drawn:
            live[ARENA] += _STATE_BYTES
            drawn.add(node)
        reads, makes = copies.read[position], copies.made[position]
        taken = -1
        if makes and (allowed := facts.takes[node]) and sizes[storage[makes[0]]]:
            for copy in reads:
                if last[copy] == position and storage[copy] in allowed and sizes[storage[copy]]:
                    taken = copy
                    break
        for k, copy in enumerate(makes):
            s = storage[copy]
            if k == 0 and taken >= 0:
                where, size = room.pop(taken)
                room[copy] = (where, max(size, sizes[s]))
                live[where] += room[copy][1] - size
            else:
                room[copy] = (space[s], sizes[s])
                live[space[s]] += sizes[s]
        arena[position] = live[ARENA] + facts.scratch[node]
        external[position] = live[EXTERNAL]
        for copy in (*reads, *makes):
            if last[copy] == position and copy in room:
                where, size = room.pop(copy)
                live[where] -= size
        if copies.states.get(node) == position:
            live[ARENA] -= _STATE_BYTES
    return Bytes(arena, external)


@dataclass(frozen=True)
class Copies:
    """Each copy of a storage: which storage, and the position of its last reader (its maker's if it has none; the end of the order if it is held).
    given: copies that nobody in the order makes. read, made: copies of each position. states: drawing node -> position of its last mirror."""

    storage: list[int]
    last: list[int]
    given: list[int]
    read: list[tuple[int, ...]]
    made: list[tuple[int, ...]]
    states: dict[int, int]


def _copies(facts: Facts, order: Order, alive: list[bool], held: Collection[int]) -> Copies:
    current: dict[int, int] = {}
    found = Copies([], [], [], [], [], {})
    storage, last = found.storage, found.last
    originals: dict[int, int] = {}
    seen: set[int] = set()
    for position, node in enumerate(order):
        reads, makes = [], []
        if alive[position]:
            for s in facts.reads[node]:
                copy = current.get(s, -1)
                if copy < 0:
                    copy = current[s] = len(storage)
                    storage.append(s)
                    last.append(position)
                    found.given.append(copy)
                last[copy] = position
                reads.append(copy)
            for s in facts.makes[node]:
                copy = current[s] = len(storage)
                originals.setdefault(s, copy)
                storage.append(s)
                last.append(position)
                makes.append(copy)
            if facts.draws[node] and node in seen:
                found.states[node] = position
        seen.add(node)
        found.read.append(tuple(reads))
        found.made.append(tuple(makes))
    for s in held:
        if s in originals:
            last[originals[s]] = len(order)
    return found
