"""A long graph from short ones: what repeats is learnt from graphs of few repetitions and stamped out as often as it is needed.

Graphs of one family differ in how often something repeats: the blocks of a net, the time steps of a recurrent one. The repetitions stand in runs (the
stages of a residual net are four). `learn` is given the graph of the least numbers and, for each run, the graph with one repetition more; by lining
them up it finds where nodes are added, and how each whole number (a size, an argument, a digit in a name, the place of what a node reads) goes with
the number of repetitions and with the repetition it stands in: always a + b j + sum of c_r e_r, for repetition j and e_r repetitions more in run r.
Nothing but whole numbers may change. `stamp` writes the graph down for any number of repetitions, in time linear in its size.

A pattern is kept only if it foretells a longer graph, with two repetitions more in every run, to the last number.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from packhorse.graph.ir import Graph, Input, Node, Output, Ref, Value


class Unlike(Exception):
    """The graphs do not follow one pattern."""


# -- graphs as trees: names of values are gone, whole numbers are apart from all that must not change -----------------------------------


class Same(NamedTuple):
    """What must be equal everywhere."""

    value: Any


class Place(NamedTuple):
    """A value: the `result`-th of node number `number`, or input number `number`."""

    kind: str  # "input" or "node"
    number: int
    result: int


class Text(NamedTuple):
    """A string, its whole numbers apart: texts and numbers in turn, beginning and ending with a text."""

    parts: tuple


# A tree is a Same, a Place, a Text, an int, or a tuple of trees.
Trees = tuple[list, list, list]  # of inputs, nodes, outputs


def trees(graph: Graph, labels: dict[str, Any]) -> Trees:
    """The graph without names. labels: target of a constant -> what must be equal for two constants to be the same."""
    where: dict[str, Place] = {}
    inputs = []
    for index, given in enumerate(graph.inputs):
        where[given.value.name] = Place("input", index, 0)
        is_random = given.role == "random"  # its name is not the user's
        words = (_text(given.target), Same("") if is_random else _text(given.value.name))
        inputs.append((Same((given.role, labels.get(given.target))), *words, _value(given.value, where)))
    nodes = []
    for index, node in enumerate(graph.nodes):
        args = _arg(node.args, where)
        kwargs = tuple((Same(key), _arg(value, where)) for key, value in node.kwargs)
        results = tuple(Same(None) if v is None else _value(v, where) for v in node.outputs)
        fixed = Same((node.op, node.phase, node.source, node.rng_in is not None, node.mark, node.mark_name))
        nodes.append((fixed, _text(node.module), args, kwargs, results))
        where.update((v.name, Place("node", index, k)) for k, v in enumerate(node.outputs) if v is not None)
    # the last random state has no place of its own: there is one for each chain
    outputs = [(Same(o.role), _text(o.target), Same("state") if o.role == "random" else where[o.name]) for o in graph.outputs]
    return inputs, nodes, outputs


def same_but_for_names(a: Graph, b: Graph, labels_a: dict[str, Any], labels_b: dict[str, Any]) -> bool:
    """Whether both are the same program, whatever they call the values that nodes make. Linear in their size. labels: as for `trees`."""
    if (len(a.inputs), len(a.nodes), len(a.outputs)) != (len(b.inputs), len(b.nodes), len(b.outputs)):
        return False
    names: dict[str | None, str | None] = {None: None}  # in a -> in b

    def alike(x: Any, y: Any) -> bool:
        kind = type(x)
        if kind is not type(y):
            return False
        if kind is Ref:
            return names.get(x.name) == y.name
        if kind is tuple:
            return len(x) == len(y) and all(map(alike, x, y))
        if kind is Value:
            names[x.name] = y.name
            return (x.dtype, x.shape, x.strides, x.offset) == (y.dtype, y.shape, y.strides, y.offset) and names.get(x.base) == y.base
        return repr(x) == repr(y) if kind is float else x == y

    for i, k in zip(a.inputs, b.inputs):
        user_named = i.role == "random" or i.value.name == k.value.name
        same_label = labels_a.get(i.target) == labels_b.get(k.target)
        if (i.role, i.target) != (k.role, k.target) or not (user_named and same_label and alike(i.value, k.value)):
            return False
    for m, n in zip(a.nodes, b.nodes):
        told = (m.op, m.phase, m.module, m.source, m.mark, m.mark_name)
        if told != (n.op, n.phase, n.module, n.source, n.mark, n.mark_name) or names.get(m.rng_in) != n.rng_in:
            return False
        if not (alike(m.args, n.args) and alike(m.kwargs, n.kwargs) and alike(m.outputs, n.outputs)):
            return False
        if m.rng_out is not None:
            names[m.rng_out] = n.rng_out
    return all((x.role, x.target, names.get(x.name)) == (y.role, y.target, y.name) for x, y in zip(a.outputs, b.outputs))


def _text(text: str) -> Text | Same:
    parts = re.split(r"(?<![\d])(0|[1-9]\d*)(?![\d])", text)
    return Same(text) if len(parts) == 1 else Text(tuple(int(p) if k % 2 else p for k, p in enumerate(parts)))


def _value(value: Value, where: dict[str, Place]) -> tuple:
    base = Same(None) if value.base is None else where[value.base]
    return Same(value.dtype), tuple(value.shape), tuple(value.strides), base, value.offset


def _arg(arg: Any, where: dict[str, Place]) -> Any:
    if isinstance(arg, Ref):
        return where[arg.name]
    if isinstance(arg, tuple):
        return tuple(_arg(item, where) for item in arg)
    if isinstance(arg, int) and not isinstance(arg, bool):
        return arg
    # equal floats may print otherwise (0.0 and -0.0), and nan equals nothing: it is the text that counts
    return Same((type(arg).__name__, repr(arg), arg if arg == arg else None))


# -- rules: what a tree is in repetition j, with e_r repetitions more in run r --------------------------------------------------------


class Line(NamedTuple):
    """start + step * j + sum(more[r] * e_r)"""

    start: int
    step: int
    more: tuple[int, ...]


class PlaceRule(NamedTuple):
    kind: str
    number: Line
    result: Line


class TextRule(NamedTuple):
    parts: tuple  # of str and Line


class Grown(NamedTuple):
    """A sequence in which the items `again` stand once and once more for each repetition more of `run`."""

    before: tuple
    run: int
    again: tuple
    after: tuple


Rule = Any  # Same, Line, PlaceRule, TextRule, Grown, or a tuple of rules


class _Samples(NamedTuple):
    """One tree as it is seen: `at[0]` with the least numbers, `at[1 + r]` with one more in run r, all in repetition 0; `next` in repetition
    1 of run `run` with one more there (run -1: it does not repeat)."""

    at: list
    run: int
    next: Any

    def part(self, key: Callable) -> "_Samples":
        return _Samples([key(tree) for tree in self.at], self.run, key(self.next) if self.run >= 0 else None)


def _learn(seen: _Samples) -> Rule:
    first = seen.at[0]
    kinds = {type(tree) for tree in seen.at} | ({type(seen.next)} if seen.run >= 0 else set())
    if len(kinds) != 1:
        raise Unlike("kinds differ")
    if isinstance(first, Same):
        if any(tree != first for tree in seen.at) or (seen.run >= 0 and seen.next != first):
            raise Unlike(f"{first.value!r} is not the same everywhere")
        return first
    if isinstance(first, int):
        step = seen.next - seen.at[1 + seen.run] if seen.run >= 0 else 0
        return Line(first, step, tuple(number - first for number in seen.at[1:]))
    if isinstance(first, Place):
        kind = _learn(seen.part(lambda p: Same(p.kind)))
        return PlaceRule(kind.value, _learn(seen.part(lambda p: p.number)), _learn(seen.part(lambda p: p.result)))
    if isinstance(first, Text):
        if len({len(tree.parts) for tree in seen.at}) != 1 or (seen.run >= 0 and len(seen.next.parts) != len(first.parts)):
            raise Unlike("texts differ")
        rules = [_learn(seen.part(lambda t, k=k: t.parts[k] if k % 2 else Same(t.parts[k]))) for k in range(len(first.parts))]
        return TextRule(tuple(rule if k % 2 else rule.value for k, rule in enumerate(rules)))
    lengths = [len(tree) for tree in seen.at]
    if seen.run >= 0 and len(seen.next) != lengths[1 + seen.run]:
        raise Unlike("a length depends on the repetition")
    if len(set(lengths)) == 1:
        return tuple(_learn(seen.part(lambda t, k=k: t[k])) for k in range(lengths[0]))
    if seen.run >= 0:
        raise Unlike("a length inside a repetition depends on their number")
    return _learn_grown(seen.at, lengths)


def _learn_grown(at: list, lengths: list[int]) -> Grown:
    """A sequence that one run makes longer. The repetition to go by is the middle one: the first and last may be special."""
    growing = [r for r, length in enumerate(lengths[1:]) if length != lengths[0]]
    run = growing[0]
    period = lengths[1 + run] - lengths[0]
    if len(growing) > 1 or not 0 < period <= lengths[0]:
        raise Unlike("a sequence grows in more than one place")
    start = (lengths[0] - period) // 2
    end = start + period

    def item(k: int, shift: int) -> list:
        return [tree[k + (shift if r == 1 + run else 0)] for r, tree in enumerate(at)]

    before = tuple(_learn(_Samples(item(k, 0), -1, None)) for k in range(start))
    again = tuple(_learn(_Samples(item(k, 0), run, at[1 + run][k + period])) for k in range(start, end))
    after = tuple(_learn(_Samples(item(k, period), -1, None)) for k in range(end, lengths[0]))
    return Grown(before, run, again, after)


# -- lining up ------------------------------------------------------------------------------------------------------------------------


class Insert(NamedTuple):
    """Somewhere in items [start, end) of the shorter sequence, where all items repeat those `length` before, a longer one has `length` items more."""

    start: int
    end: int
    length: int
    run: int


def _inserts(short: list, long: list, run: int) -> list[Insert]:
    """What turns tokens `short` into `long`: each insert repeats what stands before it."""
    found = []
    i = j = 0
    while j < len(long):
        while i < len(short) and j < len(long) and short[i] == long[j]:
            i, j = i + 1, j + 1
        if j == len(long):
            break
        length = _inserted(short, long, i, j)
        start = i
        while start > 0 and short[start - 1] == long[j - (i - start) - 1 + length]:
            start -= 1
        found.append(Insert(start, i, length, run))
        j += length
    if i < len(short):
        raise Unlike("the longer graph lacks something of the shorter one")
    return found


def _inserted(short: list, long: list, i: int, j: int) -> int:
    """How many tokens were inserted into `long` at j: the number after which both agree for longest."""
    best, best_length = -1, 0
    for length in range(1, len(long) - j - (len(short) - i) + 1):
        if long[j - length : j] != long[j : j + length] or length > i:
            continue
        agreed = 0
        while i + agreed < len(short) and short[i + agreed] == long[j + length + agreed]:
            agreed += 1
        if i + agreed == len(short) and j + length + agreed == len(long):
            return length
        if agreed > best:
            best, best_length = agreed, length
    if not best_length:
        raise Unlike("what is added does not repeat what stands before it")
    return best_length


def _token(tree: tuple) -> Any:
    """What of an item must be alike for it to be the next repetition of another: all but numbers and what it reads."""
    return tuple(
        part if isinstance(part, Same) else part.parts[::2] if isinstance(part, Text) else len(part) if isinstance(part, tuple) and short else 0
        for part, short in zip(tree, (True, True, False, True, False))
    )


class _Fixed(NamedTuple):
    rule: Rule
    model: int  # index in the shortest graph


class _Repeated(NamedTuple):
    run: int
    rules: tuple
    models: tuple[int, ...]


Strip = list[_Fixed | _Repeated]


@dataclass(frozen=True)
class Pattern:
    """How every graph of a family follows from the number of repetitions. shortest: the graph with the least ones; inputs, nodes, outputs: rules."""

    shortest: Graph
    inputs: Strip
    nodes: Strip
    outputs: Strip


def learn(shortest: Graph, longer: Sequence[Graph], check: Graph, labels: Sequence[dict[str, Any]]) -> Pattern:
    """The pattern of a family. longer[r]: the graph with one repetition more in run r. check: with two more in every run.

    labels: as for `trees`, of the shortest, each longer one, and check. Raises Unlike if no pattern foretells `check`.
    """
    every = [trees(graph, mine) for graph, mine in zip((shortest, *longer, check), labels, strict=True)]
    strips = [_Learner([kind[part] for kind in every]).strip() for part in range(3)]
    return Pattern(shortest, *strips)


class _Learner:
    """Lines up sequences of trees, from the left."""

    def __init__(self, sequences: list[list]):
        *self.at, self.check = sequences
        self.shifts = [0] * len(self.at)  # how far what is lined up lies behind in each
        self.check_shift = 0

    def strip(self) -> Strip:
        """The rules of all items."""
        tokens = [[_token(tree) for tree in sequence] for sequence in self.at]
        strip: Strip = []
        index = 0
        inserts = sorted(insert for r, long in enumerate(tokens[1:]) for insert in _inserts(tokens[0], long, r))
        for insert, following in zip(inserts, [*inserts[1:], None]):
            shared = following is not None and following.start < insert.end
            place = self.place(insert, index, shared)
            strip += [_Fixed(self.fixed(k), k) for k in range(index, place)]
            index = place + insert.length
            strip.append(_Repeated(insert.run, tuple(self.repeated(k, insert) for k in range(place, index)), tuple(range(place, index))))
            self.shift(insert)
        strip += [_Fixed(self.fixed(k), k) for k in range(index, len(self.at[0]))]
        if len(self.check) != len(self.at[0]) + self.check_shift:
            raise Unlike("the longest graph has another number of items")
        return strip

    def place(self, insert: Insert, least: int, shared: bool) -> int:
        """The first item of the repetition to go by: what the first and last ones read may be special, so it is the one that foretells `check`.

        shared: the next run lies in the same items, which look alike over several runs; what comes after the next repetition is its affair.
        """
        window = range(max(insert.start, least), insert.end)
        before, inside = [self.holds(self.fixed, k) for k in window], [self.holds(self.repeated, k, insert) for k in window]
        shifts = self.shifts, self.check_shift
        self.shift(insert)
        after = [self.holds(self.fixed, k) for k in window]
        self.shifts, self.check_shift = shifts
        wrong_before, wrong_inside = [[0, *accumulate(not good for good in goods)] for goods in (before, inside)]
        wrong_after = [0, *accumulate(not good for good in after)]
        for first in range(len(window) - insert.length + 1):
            last = first + insert.length
            end = min(last + insert.length, len(window)) if shared else len(window)
            if not (wrong_before[first] or wrong_inside[last] - wrong_inside[first] or wrong_after[end] - wrong_after[last]):
                return window.start + first
        raise Unlike("no repetition is like all others")

    def shift(self, insert: Insert) -> None:
        """From here on, what is lined up lies behind the repetitions of `insert`."""
        self.shifts = [shift + (insert.length if r == 1 + insert.run else 0) for r, shift in enumerate(self.shifts)]
        self.check_shift += 2 * insert.length

    def holds(self, learnt: Callable[..., Rule], *args: Any) -> bool:
        try:
            learnt(*args)
        except Unlike:
            return False
        return True

    def fixed(self, k: int) -> Rule:
        """The rule of an item that does not repeat, in the shortest sequence's number k."""
        return self.foretelling(_learn(_Samples([_reached(sequence, k + shift) for sequence, shift in zip(self.at, self.shifts)], -1, None)), k, 0, 1)

    def repeated(self, k: int, insert: Insert) -> Rule:
        """The rule of an item that repeats."""
        at = [_reached(sequence, k + shift) for sequence, shift in zip(self.at, self.shifts)]
        longer = 1 + insert.run
        following = _reached(self.at[longer], k + self.shifts[longer] + insert.length)
        return self.foretelling(_learn(_Samples(at, insert.run, following)), k, insert.length, 3)

    def foretelling(self, rule: Rule, k: int, length: int, repetitions: int) -> Rule:
        extra = (2,) * (len(self.at) - 1)
        for j in range(repetitions):
            if _foretold(rule, extra, j) != _reached(self.check, k + self.check_shift + j * length):
                raise Unlike("the longest graph does not follow")
        return rule


def _foretold(rule: Rule, extra: tuple[int, ...], j: int) -> Any:
    """The tree that a rule stands for."""
    if isinstance(rule, Line):
        return rule.start + rule.step * j + sum(more * e for more, e in zip(rule.more, extra))
    if isinstance(rule, PlaceRule):
        return Place(rule.kind, _foretold(rule.number, extra, j), _foretold(rule.result, extra, j))
    if isinstance(rule, TextRule):
        return Text(tuple(_foretold(part, extra, j) if isinstance(part, Line) else part for part in rule.parts))
    if isinstance(rule, Grown):
        repeated = [_foretold(part, extra, k) for k in range(1 + extra[rule.run]) for part in rule.again]
        return (*(_foretold(part, extra, 0) for part in rule.before), *repeated, *(_foretold(part, extra, 0) for part in rule.after))
    return rule if isinstance(rule, Same) else tuple(_foretold(part, extra, j) for part in rule)


# -- stamping -------------------------------------------------------------------------------------------------------------------------

Made = tuple[bool, Any]  # (True, what it always is) or (False, function of j)


class _Stamp:
    """Rules, for one number of repetitions, as functions of j."""

    def __init__(self, extra: Sequence[int]):
        self.extra = tuple(extra)
        self.given: list[Ref] = []
        self.made: list[tuple[Ref | None, ...]] = []  # of each node so far

    def line(self, rule: Line) -> Made:
        start, step = rule.start + sum(more * e for more, e in zip(rule.more, self.extra)), rule.step
        return (True, start) if step == 0 else (False, lambda j: start + step * j)

    def text(self, rule: Rule) -> Made:
        if isinstance(rule, Same):
            return True, rule.value
        parts = [self.line(part) if isinstance(part, Line) else (True, part) for part in rule.parts]
        if all(constant for constant, _ in parts):
            return True, "".join(str(part) for _, part in parts)
        return False, lambda j: "".join(str(part if constant else part(j)) for constant, part in parts)

    def ref(self, rule: PlaceRule) -> Made:
        (index_fixed, index), (result_fixed, result) = self.line(rule.number), self.line(rule.result)
        if rule.kind == "input":
            given = self.given
            return (True, given[index]) if index_fixed else (False, lambda j: _reached(given, index(j)))
        made = self.made
        if not result_fixed:
            return False, lambda j: _reached(_reached(made, index if index_fixed else index(j)), result(j))
        start, step = (index, 0) if index_fixed else (index(0), rule.number.step)

        def of(j: int) -> Ref:  # most of the time goes into this
            place = start + step * j
            ref = made[place][result] if place >= 0 else None
            if ref is None:
                raise Unlike("a place outside the graph")
            return ref

        return False, of

    def arg(self, rule: Rule) -> Made:
        if isinstance(rule, Same):
            return True, rule.value[2] if rule.value[0] != "float" else float(rule.value[1])
        if isinstance(rule, Line):
            return self.line(rule)
        if isinstance(rule, PlaceRule):
            return self.ref(rule)
        return self.sequence(rule, self.arg)

    def lie(self, rule: Rule) -> Made:
        """(dtype, shape, strides, base, offset) of a value."""
        if isinstance(rule, Same):
            return True, None
        dtype, shape, strides, base, offset = rule
        numbers = [self.sequence(shape, self.line), self.sequence(strides, self.line)]
        root = (True, None) if isinstance(base, Same) else self.ref(base)
        parts = [(True, dtype.value), *numbers, root, self.line(offset)]
        if all(constant for constant, _ in parts):
            return True, (*(found for _, found in parts[:3]), root[1] and root[1].name, parts[4][1])
        if all(constant for constant, _ in parts[:3]):
            usual = tuple(found for _, found in parts[:3])
            return False, lambda j: (*usual, root[1] and _at(root, j).name, _at(parts[4], j))

        def of(j: int) -> tuple:
            name, shape, strides, base, offset = (_at(part, j) for part in parts)
            return name, shape, strides, base and base.name, offset

        return False, of

    def sequence(self, rule: Rule, item: Callable[[Rule], Made]) -> Made:
        if isinstance(rule, Grown):
            again = [item(part) for part in rule.again]
            count = 1 + self.extra[rule.run]
            repeated = [found if constant else found(k) for k in range(count) for constant, found in again]
            ends = [[found if constant else found(0) for constant, found in map(item, side)] for side in (rule.before, rule.after)]
            return True, (*ends[0], *repeated, *ends[1])
        parts = [item(part) for part in rule]
        changing = [(k, found) for k, (constant, found) in enumerate(parts) if not constant]
        if not changing:
            return True, tuple(found for _, found in parts)
        usual = [found if constant else None for constant, found in parts]

        def of(j: int) -> tuple:
            items = usual.copy()
            for k, found in changing:
                items[k] = found(j)
            return tuple(items)

        return False, of


class Stamped(NamedTuple):
    """models: target of each constant -> the constant of the shortest graph that it is equal to."""

    graph: Graph
    models: dict[str, str]


def stamp(pattern: Pattern, extra: Sequence[int]) -> Stamped:
    """The graph with extra[r] repetitions more in run r than the shortest one has. Values made in repetition j are called `name.r<j>`.

    Raises Unlike if the pattern leads to what is no graph.
    """
    press = _Stamp(extra)
    inputs, models = _stamp_inputs(pattern, press)
    nodes, last = _stamp_nodes(pattern, press, {i.target: i.value.name for i in inputs if i.role == "random"}, {i.value.name for i in inputs})
    outputs = []
    for rule, j, _ in _each(pattern.outputs, press.extra):
        role, target = rule[0].value, _at(press.text(rule[1]), j)
        outputs.append(Output(last[target] if role == "random" else _at(press.ref(rule[2]), j).name, role, target))
    return Stamped(Graph(pattern.shortest.name, tuple(inputs), tuple(nodes), tuple(outputs)), models)


def _stamp_inputs(pattern: Pattern, press: _Stamp) -> tuple[list[Input], dict[str, str]]:
    inputs: list[Input] = []
    models = {}
    for rule, j, model in _each(pattern.inputs, press.extra):
        (role, _), target, value = rule[0].value, _at(press.text(rule[1]), j), rule[3]
        name = f".rng{sum(i.role == 'random' for i in inputs)}" if role == "random" else _at(press.text(rule[2]), j)
        inputs.append(Input(Value(name, *_at(press.lie(value), j)), role, target))
        press.given.append(Ref(name))
        if role == "constant":
            models[target] = pattern.shortest.inputs[model].target
    return inputs, models


def _stamp_nodes(pattern: Pattern, press: _Stamp, states: dict[str, str], taken: set[str]) -> tuple[list[Node], dict[str, str]]:
    """states: chain of random states -> the one that it begins with; returned with the one that it ends with. taken: names of inputs."""
    nodes: list[Node] = []
    states, count = dict(states), len(states)
    for part in pattern.nodes:
        again = isinstance(part, _Repeated)
        rules, models = (part.rules, part.models) if isinstance(part, _Repeated) else ((part.rule,), (part.model,))
        makers = [_maker(press, rule, pattern.shortest.nodes[model]) for rule, model in zip(rules, models)]
        for j in range(1 + press.extra[part.run] if isinstance(part, _Repeated) else 1):
            end = f".r{j}" if again else ""
            for chain, make in makers:
                if chain is None:
                    node = make(end, j, None, None)
                else:
                    before, states[chain], count = states[chain], f".rng{count}", count + 1
                    node = make(end, j, before, states[chain])
                nodes.append(node)
                press.made.append(tuple([None if v is None else Ref(v.name) for v in node.outputs]))
    if any(v is not None and v.name in taken for node in nodes for v in node.outputs):
        raise Unlike("a name is taken")
    return nodes, states


Maker = Callable[[str, int, str | None, str | None], Node]


def _maker(press: _Stamp, rule: tuple, model: Node) -> tuple[str | None, Maker]:
    """The chain that a node draws from, if it draws, and the function (what its names end in, j, random state before, after) -> the node."""
    fixed, module_rule, args_rule, kwargs_rule, outputs_rule = rule
    op, phase, source, draws, mark, mark_name = fixed.value
    module_fixed, module = press.text(module_rule)
    args_fixed, args = press.sequence(args_rule, press.arg)
    keys = [key.value for key, _ in kwargs_rule]
    kwargs_fixed, kwargs = press.sequence(tuple(value for _, value in kwargs_rule), press.arg)
    lies_fixed, lies = press.sequence(outputs_rule, press.lie)
    names = [v.name for v in model.outputs if v is not None]
    stem = names[0] if len(model.outputs) == 1 else names[0].rpartition(".")[0] if names else ""
    single = len(model.outputs) == 1
    pairs = tuple(zip(keys, kwargs)) if kwargs_fixed else ()

    def make(end: str, j: int, rng_in: str | None, rng_out: str | None) -> Node:
        lie = lies if lies_fixed else lies(j)
        outputs: tuple[Value | None, ...]
        if single:
            outputs = (None if lie[0] is None else Value(stem + end, *lie[0]),)
        else:
            outputs = tuple([None if one is None else Value(f"{stem}{end}.{k}", *one) for k, one in enumerate(lie)])
        return Node(
            op,
            args if args_fixed else args(j),
            pairs if kwargs_fixed else tuple(zip(keys, kwargs(j))),
            outputs,
            phase,
            module if module_fixed else module(j),
            source,
            rng_in,
            rng_out,
            mark,
            mark_name,
        )

    return model.generator if draws else None, make


def _each(strip: Strip, extra: tuple[int, ...]):
    """(rule, repetition, index in the shortest graph) of each item, in order."""
    for part in strip:
        if isinstance(part, _Fixed):
            yield part.rule, 0, part.model
        else:
            for j in range(1 + extra[part.run]):
                yield from ((rule, j, model) for rule, model in zip(part.rules, part.models))


def _at(made: Made, j: int) -> Any:
    return made[1] if made[0] else made[1](j)


def _reached(sequence: Sequence, index: int) -> Any:
    """An item that must be there."""
    if not 0 <= index < len(sequence) or sequence[index] is None:
        raise Unlike("a place outside the graph")
    return sequence[index]
