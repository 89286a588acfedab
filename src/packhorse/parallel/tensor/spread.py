"""The graph of one tp rank in the making: what it has of each value, and how one place becomes another. No torch.

A value that is not where an operator needs it is moved there by a collective, or for free by a view of what is here:

    Sum -> Whole      tensor_sum       all-reduce (g in the forward pass, the conjugate f in the backward pass; Shoeybi et al. 2019, section 3)
    Sum -> Split      tensor_scatter   reduce-scatter
    Split -> Whole    tensor_gather    all-gather
    Whole -> Split    a view
    Split -> Sum      zeros around the part
"""

from dataclasses import dataclass, replace
from math import prod

from packhorse.errors import CaptureError
from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Arg, Const, Graph, Input, Node, Ref, Value, contiguous_strides, map_refs
from packhorse.graph.operators import TENSOR_GATHER, TENSOR_SCATTER, TENSOR_SUM, VIEWS
from packhorse.parallel.pieces import BUCKET_BYTES
from packhorse.parallel.split import Sharding, Split
from packhorse.parallel.tensor.placed import WHOLE, Owed, Place, Sum, Whole, local_value

STREAMS = OUTSIDE, INSIDE = "outside", "inside"  # of random numbers (Shoeybi et al. 2019, appendix B.2)


@dataclass(frozen=True)
class Gathered:
    """A split value that an operator needed whole because it has no rule for parts: (operator, module, source, elements of the whole value)."""

    op: str
    module: str
    source: str
    num_elements: int


class Spread:
    """What this rank has of the values of `graph` so far, and the nodes that make it.

    place, local: of each value of the graph, by its name. tokens: (batch, sequence) of the batch, where sequences are split.
    """

    def __init__(self, graph: Graph, sharding: Sharding, tokens: tuple[int, int] | None):
        self.graph, self.sharding, self.tokens = graph, sharding, tokens
        self.degree, self.rank = sharding.degree, sharding.rank
        self.full = graph.values
        self.users = graph.users()
        self.place: dict[str, Place] = {}
        self.local: dict[str, Value] = {}
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.gathered: list[Gathered] = []
        self.node: Node = Node("", (), (), ())  # the one that is being spread
        self.random: dict[str, str] = {}  # generator -> name of its newest state
        self.made: dict[tuple[str, Place, str], Value] = {}
        self.roots: dict[str, Value] = {}  # every storage of this rank, by name
        self.tags: dict[str, int] = {}
        self.cuts: dict[tuple[tuple[int, ...], int], Split] = {}  # (shape, dim) of what was cut up -> how it was split
        self.owed: dict[str, tuple[Value, Value]] = {}  # (value in its place, sum over ranks to be added)
        self.picked: dict[str, tuple[Value, Value]] = {}  # log-probabilities -> (log-sum-exp, the targets' logits)
        self.wanted: dict[str, Split] = {}  # gradient, or what goes into it -> how its parameter is split
        self.makers = {v.name: node for node in graph.nodes for v in node.outputs if v is not None}
        self.parameters = {entry.value.name for entry in graph.inputs if entry.role == "param"}
        self.num_values = 0

    # -- what is here -----------------------------------------------------------------------------------------------------------------

    def given(self, entry: Input, place: Place) -> None:
        """An input of the whole graph, as this rank has it."""
        value = entry.value if isinstance(place, Whole) else local_value(entry.value, place, self.degree)
        self.inputs.append(replace(entry, value=value))
        self._know(entry.value.name, value, place)

    def _know(self, name: str, value: Value, place: Place) -> None:
        self.local[name], self.place[name] = value, place
        if value.base is None and not isinstance(place, Owed):
            self.roots[value.name] = value

    def settled(self, name: str) -> Place:
        """Where a value is once it is no sum any more: a sum is added up here, to all ranks or to each one's part of the sequence."""
        place = self.place[name]
        if isinstance(place, Sum):
            wanted = self.along_sequence(self.full[name]) or WHOLE
            self._know(name, self.at(name, wanted), wanted)
        if isinstance(place, Owed):
            self._pay(name, place.place)
        return self.place[name]

    def is_laid_out_as(self, name: str, result: Value | None) -> bool:
        """What this rank has of a value lies as `result` would."""
        value = self.local[name]
        return result is not None and (value.dtype, value.shape, value.strides) == (result.dtype, result.shape, result.strides)

    def same(self, result: Value | None, name: str) -> None:
        """`result` is what this rank has of another value: a copy that nothing can tell from it."""
        assert result is not None
        self.makers[result.name] = self.maker(self.full[name].root)
        self._know(result.name, self.local[name], self.place[name])

    def owe(self, result: Value, name: str, term: str) -> None:
        """result = the value `name` + the sum `term`, which is not added up over ranks yet."""
        place, added = self.place[name], self.local[term]
        if isinstance(place, Owed):
            base, before = self.owed[name]
            place = place.place
            added = self.new("aten.add.Tensor", (Ref(before.name), Ref(added.name)), _plain(result))
        else:
            base = self.local[name]
        assert not isinstance(place, Sum)
        self.owed[result.name] = base, added
        self._know(result.name, _plain(result), Owed(place))

    def _pay(self, name: str, place: Whole | Split) -> None:
        """Adds what is owed to a value."""
        base, term = self.owed[name]
        whole = self.full[name]
        moved = self._added_up(name, term) if isinstance(place, Whole) else self._scattered(term, place, name)
        total = self.new("aten.add.Tensor", (Ref(base.name), Ref(moved.name)), local_value(whole, place, self.degree))
        self._know(name, total, place)

    def along_sequence(self, value: Value) -> Split | None:
        """How activations of its shape are split where sequences are; None for any other value."""
        if self.tokens is None or len(value.shape) < 2:
            return None
        batch, length = self.tokens
        dim, size = len(value.shape) - 2, value.shape[-2]
        if size == length:
            return Split(dim, (length,))
        return Split(dim, (length,) * batch) if size == batch * length and dim == 0 else None

    def is_parameter(self, name: str) -> bool:
        """The value is a parameter, or a view of one."""
        return self.full[name].root in self.parameters

    def maker(self, name: str) -> Node:
        """The node of the whole graph that makes a value; one without a place for an input."""
        return self.makers.get(name, Node("", (), (), ()))

    # -- nodes -------------------------------------------------------------------------------------------------------------------------

    def emit(self, op: str, args: tuple[Arg, ...], results: list[tuple[Value | None, Place]], kwargs: tuple[tuple[str, Arg], ...] = ()) -> None:
        """A node that makes results of the node that is being spread, each a storage of its own. results: (value of the whole graph, place)."""
        outputs = tuple(None if value is None else local_value(value, place, self.degree) for value, place in results)
        draws = any(isinstance(place, Split) for _, place in results)
        replicated = all(value is None or isinstance(place, Whole) for value, place in results)
        self._append(op, args, outputs, kwargs, draws, replicated)
        for (value, place), made in zip(results, outputs):
            if value is not None and made is not None:
                self._know(value.name, made, place)

    def _append(
        self, op: str, args: tuple[Arg, ...], outputs: tuple[Value | None, ...], kwargs: tuple, draws: bool, replicated: bool = False
    ) -> None:
        node = replace(self.node, op=op, args=args, kwargs=kwargs, outputs=outputs, replicated=replicated)
        if node.rng_in is not None:
            chain = INSIDE if draws else OUTSIDE if node.generator == "default" else node.generator
            node = replace(node, kwargs=(*((k, v) for k, v in kwargs if k != "generator"), ("generator", Const("generator", chain))))
            node = replace(node, rng_in=self._newest(chain), rng_out=self._next_state(chain))
        self.nodes.append(node)
        self.roots.update((v.name, v) for v in outputs if v is not None and v.base is None)

    def _newest(self, chain: str) -> str:
        if chain not in self.random:
            name = self._next_state(chain)
            self.inputs.append(Input(Value(name, "rng", (), ()), "random", chain))
        return self.random[chain]

    def _next_state(self, chain: str) -> str:
        self.num_values += 1
        self.random[chain] = name = f".rng.{chain}.{self.num_values}"
        return name

    def new(self, op: str, args: tuple[Arg, ...], value: Value, kwargs: tuple[tuple[str, Arg], ...] = ()) -> Value:
        """A node that makes a value besides those of the whole graph. Its name is made up."""
        self.num_values += 1
        value = replace(value, name=f".tp{self.num_values}")
        brings_all = op in (TENSOR_SUM, TENSOR_GATHER)
        node = Node(op, args, kwargs, (value,), self.node.phase, self.node.module, self.node.source, replicated=brings_all)
        self.nodes.append(node)
        if value.base is None:
            self.roots[value.name] = value
        return value

    def emit_as(self, args: tuple[Arg, ...], results: list[tuple[Value, Place]], more: list[Value], kwargs: tuple) -> None:
        """The node with some results that are values of the whole graph, and others under names of their own."""
        outputs = (*(local_value(value, place, self.degree) for value, place in results), *more)
        self._append(self.node.op, args, outputs, kwargs, draws=False)
        for value, place in results:
            self._know(value.name, self.roots[value.name], place)

    def new_pair(self, op: str, args: tuple[Arg, ...], first: Value, second: Value) -> tuple[Value, Value]:
        """A node that makes two values besides those of the whole graph."""
        made = []
        for value in (first, second):
            self.num_values += 1
            made.append(replace(value, name=f".tp{self.num_values}"))
        self.nodes.append(Node(op, args, (), tuple(made), self.node.phase, self.node.module, self.node.source))
        self.roots.update((value.name, value) for value in made)
        return made[0], made[1]

    def zeros_around(self, whole: Value, part: Value, dim: int, first: int, last: int) -> None:
        """A value of the whole graph of which this rank's term is zero but for [first, last) of a dim."""
        self._know(whole.name, self._among_zeros(part, whole.shape, dim, first, last), Sum(lazy=True))

    def gathered_flat(self, value: Value, name: str) -> Value:
        """What all ranks have of it, one after another."""
        result = Value("", value.dtype, (self.degree * value.num_elements,), (1,))
        return self.new(TENSOR_GATHER, (Ref(value.name),), result, self.over(name))

    def need_whole(self, *names: str) -> None:
        """Writes down that the node has no rule for parts of these."""
        node = self.node
        for name in names:
            if isinstance(self.place[name], Split):
                self.gathered.append(Gathered(node.op, node.module, node.source, self.full[name].num_elements))

    def all_whole(self) -> None:
        """The node on whole values, on every rank alike."""
        names = list(dict.fromkeys(self.node.arg_names()))
        self.need_whole(*names)
        self.again({name: self.at(name, WHOLE) for name in names})

    def again(self, names: dict[str, Value]) -> None:
        """The node as it is, on other values: everything is whole. names: of its arguments."""

        def change(name: str) -> Ref:
            return Ref(names[name].name)

        args = tuple(map_refs(arg, change) for arg in self.node.args)
        kwargs = tuple((key, map_refs(arg, change)) for key, arg in self.node.kwargs)
        results: list[tuple[Value | None, Place]] = [(value, WHOLE) for value in self.node.outputs]
        outputs = tuple(value if value is None or value.base is None else None for value in self.node.outputs)
        assert outputs == self.node.outputs, f"{self.node.op} gives a view"
        self._append(self.node.op, args, outputs, kwargs, draws=False, replicated=True)
        for value, place in results:
            if value is not None:
                self._know(value.name, value, place)

    def views(self, results: list[tuple[Value, Place]]) -> None:
        """The node, which gives views: as it is where they are those of the whole graph, else with this rank's."""
        values = tuple(value for value, _ in results)
        if values == tuple(value for value in self.node.outputs if value is not None):
            self.nodes.append(self.node)
        else:
            self.nodes.append(replace(self.node, op=VIEWS, args=(Ref(values[0].root),), kwargs=(), outputs=values))
        for value, place in results:
            self._know(value.name, value, place)

    def view(self, of: Value, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> Value:
        """A view besides those of the whole graph: offset in elements beyond those of `of`."""
        if (shape, strides, offset) == (of.shape, of.strides, 0):
            return of
        value = Value("", of.dtype, shape, strides, of.root, of.offset + offset * ITEMSIZE[of.dtype])
        return self.new(VIEWS, (Ref(of.root),), value)

    def copy(self, of: Value) -> Value:
        """A storage of its own, row by row."""
        return self.new("aten.clone.default", (Ref(of.name),), Value("", of.dtype, of.shape, contiguous_strides(of.shape)))

    def row_by_row(self, value: Value) -> Value:
        """The value, copied if it lies otherwise: some kernels read what they have saved as if it did not."""
        return value if value.strides == contiguous_strides(value.shape) else self.copy(value)

    def copy_as(self, value: Value, like: Value) -> Value:
        """A storage of its own in which the elements lie as those of `like`. Raises CaptureError if that has gaps."""
        if not like.is_dense:
            raise CaptureError(
                f"the training step cannot be captured for several tensor parallel ranks: {self.node.op} in module "
                f"{self.node.module or '(outermost)'!r} at {self.node.source or 'an unknown line'} views the memory of a tensor that is split; "
                "write it with reshape, transpose or slices, or leave the parameters that lead to it whole (tensor_plan)"
            )
        return self.new("aten.clone.default", (Ref(value.name),), Value("", value.dtype, like.shape, like.strides))

    # -- from one place to another -----------------------------------------------------------------------------------------------------

    def at(self, name: str, wanted: Place) -> Value:
        """A value of the whole graph in another place. Collectives are made once, but what a gather brought is not kept for the backward pass."""
        place = self.place[name]
        if isinstance(place, Owed):
            place = self.settled(name)
        assert not isinstance(place, Owed)
        if place == wanted or (isinstance(place, Sum) and isinstance(wanted, Sum)):
            return self.local[name]
        gathers = isinstance(place, Split) and isinstance(wanted, Whole)
        key = name, wanted, self.node.phase if gathers else ""
        if key not in self.made:
            self.made[key] = self._moved(name, place, wanted)
        return self.made[key]

    def ref(self, name: str, wanted: Place) -> Ref:
        """`at`, as an argument."""
        return Ref(self.at(name, wanted).name)

    def _moved(self, name: str, place: Whole | Split | Sum, wanted: Place) -> Value:
        value, whole = self.local[name], self.full[name]
        if isinstance(place, Sum):
            return self._added_up(name, value) if isinstance(wanted, Whole) else self._scattered(value, wanted, name)  # type: ignore[arg-type]
        if isinstance(place, Whole):
            assert isinstance(wanted, Split), f"{name} is whole and cannot be {wanted}"
            return self.part(value, wanted)
        if isinstance(wanted, Whole):
            root = self.full[whole.root]
            of_root = whole.base is not None and isinstance(self.place.get(root.name), Split) and not place.padding
            if of_root and root.strides == contiguous_strides(root.shape):
                return self.view(self.at(root.name, WHOLE), whole.shape, whole.strides, whole.offset // ITEMSIZE[whole.dtype])  # one for all views
            return self._gathered(value, place, whole.shape, name)
        if isinstance(wanted, Split):
            return self.part(self.at(name, WHOLE), wanted)
        assert len(place.blocks) == 1 and not place.padding
        return self._among_zeros(value, whole.shape, place.dim, *place.parts(self.rank, self.degree)[0])

    def part(self, value: Value, split: Split) -> Value:
        """This rank's part of a whole value: a view where there is one block, else a copy."""
        if split.padding:
            after = 2 * (len(value.shape) - 1 - split.dim) + 1
            pads = tuple(split.padding if index == after else 0 for index in range(after + 1))
            shape = (*value.shape[: split.dim], split.size, *value.shape[split.dim + 1 :])
            value = self.new("aten.constant_pad_nd.default", (Ref(value.name), pads), Value("", value.dtype, shape, contiguous_strides(shape)))
        parts = [self.narrow(value, split.dim, first, last) for first, last in split.parts(self.rank, self.degree)]
        if len(parts) == 1:
            return parts[0]
        if len(set(split.blocks)) == 1:
            return self.copy_blocks(value, split)
        shape = split.local(value.shape, self.degree)
        return self.new(
            "aten.cat.default", (tuple(Ref(part.name) for part in parts), split.dim), Value("", value.dtype, shape, contiguous_strides(shape))
        )

    def copy_blocks(self, value: Value, split: Split) -> Value:
        """This rank's part of every one of many equal blocks."""
        dim, size = split.dim, split.blocks[0] // self.degree
        stride = value.strides[dim]
        shape = (*value.shape[:dim], len(split.blocks), size, *value.shape[dim + 1 :])
        strides = (*value.strides[:dim], split.blocks[0] * stride, stride, *value.strides[dim + 1 :])
        own = self.copy(self.view(value, shape, strides, self.rank * size * stride))
        local = split.local(value.shape, self.degree)
        return self.view(own, local, contiguous_strides(local))

    def narrow(self, value: Value, dim: int, first: int, last: int) -> Value:
        """[first, last) of one dim."""
        shape = (*value.shape[:dim], last - first, *value.shape[dim + 1 :])
        return self.view(value, shape, value.strides, first * value.strides[dim])

    def _added_up(self, name: str, value: Value) -> Value:
        """The sum over ranks, everywhere. Views of all of a storage share one."""
        root = self.roots[value.root]
        covers = value.base is not None and root.is_dense and value.is_dense and (value.offset, value.extent_bytes) == (0, root.extent_bytes)
        if covers and value.dtype == root.dtype:
            total = self.made.get((root.name, WHOLE, "storage")) or self._summed(root, name)
            self.made[root.name, WHOLE, "storage"] = total
            return self.view(total, value.shape, value.strides)
        if value.base is None:
            total = self.made.get((value.name, WHOLE, "storage")) or self._summed(value, name)
            self.made[value.name, WHOLE, "storage"] = total
            return total
        return self._summed(self.copy(value), name)

    def add_up_together(self, names: list[str]) -> None:
        """Sums over ranks of small values as few collectives: copied into one, a bucket at a time."""
        rest = list(names)
        while rest:
            group = [rest.pop(0)]
            size = self.full[group[0]].extent_bytes
            while rest and self.full[rest[0]].dtype == self.full[group[0]].dtype and size < BUCKET_BYTES:
                size += self.full[rest[0]].extent_bytes
                group.append(rest.pop(0))
            if len(group) == 1:
                continue
            flat = []
            for name in group:
                value = self.local[name]
                if not value.is_dense:
                    self.local[name] = value = self.copy(value)
                flat.append(self.view(value, (value.num_elements,), (1,)))
            total = Value("", self.full[group[0]].dtype, (sum(value.num_elements for value in flat),), (1,))
            joined = self.new("aten.cat.default", (tuple(Ref(value.name) for value in flat),), total)
            summed, at = self._summed(joined, group[0]), 0
            for name in group:
                value = self.local[name]
                self._know(name, self.view(summed, value.shape, value.strides, at), WHOLE)
                at += value.num_elements

    def _summed(self, value: Value, name: str) -> Value:
        assert value.is_dense and value.base is None
        return self.new(TENSOR_SUM, (Ref(value.name),), replace(value, base=None, offset=0), self.over(name))

    def _scattered(self, value: Value, split: Split, name: str) -> Value:
        """The sum over ranks, each rank's part where it belongs."""
        local = split.local(value.shape, self.degree)
        ordered = value
        dim, size, stride = split.dim, split.blocks[0] // self.degree, value.strides[split.dim]
        outermost = len(split.blocks) == 1 and prod(value.shape[:dim]) == 1
        if not (outermost and value.is_dense and value.strides == contiguous_strides(value.shape)):
            assert len(set(split.blocks)) == 1 and not split.padding, f"{name}: a sum over ranks to {split}"
            shape = (self.degree, *value.shape[:dim], len(split.blocks), size, *value.shape[dim + 1 :])
            strides = (size * stride, *value.strides[:dim], split.blocks[0] * stride, stride, *value.strides[dim + 1 :])
            ordered = self.copy(self.view(value, shape, strides))
        return self.new(TENSOR_SCATTER, (Ref(ordered.name),), Value("", value.dtype, local, contiguous_strides(local)), self.over(name))

    def _gathered(self, value: Value, split: Split, shape: tuple[int, ...], name: str) -> Value:
        """The parts of all ranks as one value, padding left out."""
        if not (value.base is None and value.is_dense):
            value = self.copy(value)
        n = value.num_elements
        flat = self.new(TENSOR_GATHER, (Ref(value.name),), Value("", value.dtype, (self.degree * n,), (1,)), self.over(name))
        dim = split.dim
        padded = (*shape[:dim], split.size, *shape[dim + 1 :])
        if len(split.blocks) == 1 and prod(shape[:dim]) == 1 and value.strides == contiguous_strides(value.shape):
            whole = self.view(flat, padded, contiguous_strides(padded))
        elif len(set(split.blocks)) == 1:
            size, stride = split.blocks[0] // self.degree, value.strides[dim]
            pieces = (*shape[:dim], len(split.blocks), self.degree, size, *shape[dim + 1 :])
            strides = (*value.strides[:dim], size * stride, n, stride, *value.strides[dim + 1 :])
            whole = self.copy(self.view(flat, pieces, strides))
            whole = self.view(whole, padded, contiguous_strides(padded))
        else:
            parts, at = [], 0
            for block in split.blocks:
                size = block // self.degree
                piece = (*shape[:dim], size, *shape[dim + 1 :])
                parts += [self.view(flat, piece, value.strides, rank * n + at * value.strides[dim]) for rank in range(self.degree)]
                at += size
            args = (tuple(Ref(part.name) for part in parts), dim)
            whole = self.new("aten.cat.default", args, Value("", value.dtype, padded, contiguous_strides(padded)))
        return self.narrow(whole, dim, 0, shape[dim]) if split.padding else whole

    def _among_zeros(self, part: Value, shape: tuple[int, ...], dim: int, first: int, last: int) -> Value:
        """A part as a term of a sum: zeros elsewhere."""
        result = Value("", part.dtype, shape, contiguous_strides(shape))
        return self.new("aten.slice_backward.default", (Ref(part.name), shape, dim, first, last, 1), result)

    def over(self, name: str) -> tuple[tuple[str, Arg], ...]:
        """Keyword arguments of a collective about a value: the axis, and a name for it that occurs once."""
        letter = "f" if self.node.phase == "backward" else "g"
        root = self.full[name].root if name in self.full else name  # what made it, not who looks at it
        tag = f"{letter} {self.maker(root).module or self.node.module or self.graph.name}"
        self.tags[tag] = count = self.tags.get(tag, 0) + 1
        tag = f"{tag} {count}" if count > 1 else tag
        return (("axis", "tp"), ("ranks", self.degree), ("rank", self.rank), ("tag", tag))


def _plain(value: Value) -> Value:
    """A storage of its own of that layout."""
    return local_value(value, WHOLE, 1)
