"""The joint fx graph -> our Graph: views share their root's storage, identities vanish, random operators are chained, marks find their nodes."""

import operator as python_operator
from dataclasses import replace
from typing import Any

import torch

from packhorse.capture.dtypes import LONG, SHORT, to_const
from packhorse.capture.location import place_of
from packhorse.capture.trace import Trace
from packhorse.errors import CaptureError
from packhorse.graph.ir import Arg, Const, Graph, Input, Node, Output, Ref, Value, contiguous_strides
from packhorse.graph.operators import operator

# These return their argument; the graph uses the argument itself.
_IDENTITY = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh.default", "aten.lift.default"}

# Views whose schema does not say so: the kernel returns its argument's memory.
_SILENT_VIEWS = {
    "aten._unsafe_view.default",
    "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
    "aten._reshape_alias.default",
}

# Views that mean another value by a bit on the tensor, which memory does not show: the value is computed instead.
_MADE_REAL = {"aten._conj.default": "aten._conj_physical.default", "aten._neg_view.default": "aten.neg.default"}

# torch tags these as random for the sake of a dropout that their CPU kernel does not have.
_TAGGED_BUT_STEADY = {"aten._scaled_dot_product_flash_attention_for_cpu.default", "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"}


class _Converter:
    def __init__(self, name: str, trace: Trace):
        self.name, self.trace = name, trace
        self.inputs: list[Input] = []
        self.nodes: list[Node] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.known: dict[torch.fx.Node, Any] = {}  # fx node -> Ref, or tuple of Ref for several results
        self.values: dict[str, Value] = {}
        self.origin: dict[str, tuple[str, str]] = {}  # value -> (module, source) of the node that made it
        self.relaid: set[str] = set()  # roots that lie in memory otherwise than on fake tensors
        self.random: dict[str, str] = {}  # chain of random states -> name of its newest
        self.num_states = 0
        self.marked: set[tuple[str, str]] = set()  # (module, source) of marks that a node has taken

    # -- inputs ---------------------------------------------------------------------------------------------------------------------

    def placeholder(self, node: torch.fx.Node, role: str, target: str) -> None:
        self.known[node] = Ref(self.add_input(node.meta["val"], role, target, f"{role}.{target}" if role == "batch" else target))

    def add_input(self, tensor: torch.Tensor, role: str, target: str, name: str) -> str:
        name = self.unique(name.replace(" ", "_"))
        value = Value(name, SHORT[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()))
        self.values[name] = value
        self.inputs.append(Input(value, role, target))
        return name

    def unique(self, name: str) -> str:
        while name in self.values:
            name += "_"
        return name

    # -- nodes ----------------------------------------------------------------------------------------------------------------------

    def call(self, node: torch.fx.Node) -> None:
        if node.target is python_operator.getitem:
            source, index = node.args
            assert isinstance(source, torch.fx.Node)
            self.known[node] = self.known[source][index]
            return
        op = str(node.target)
        if op in _IDENTITY:
            source = node.args[0]
            assert isinstance(source, torch.fx.Node)
            self.known[node] = self.known[source]
            self.mark(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise CaptureError(
                f"the training step cannot be captured: {self.place(node)} calls {op}, which is no ordinary tensor operator (it checks values, has "
                "side effects or control flow of its own); use another operator, or compute it outside the model"
            )
        results = node.meta.get("val", ())  # an assertion on values gives nothing
        if op == "aten.embedding.default" and len(node.args) > 4 and node.args[4]:
            raise CaptureError(
                f"the training step cannot be captured: {self.place(node)} asks for sparse gradients; make the embedding with sparse=False"
            )
        op = _MADE_REAL.get(op, op)
        base = None if op in _MADE_REAL.values() else self.viewed(node, op)
        if base is not None and base.root in self.relaid:
            results = self.view_again(node)
        listed = results if isinstance(results, (tuple, list)) else [results]
        outputs: list[Value | None] = []
        for index, result in enumerate(listed):
            if result is None:
                outputs.append(None)
                continue
            if not isinstance(result, torch.Tensor) or result.dtype not in SHORT or any(not isinstance(s, int) for s in result.shape):
                raise CaptureError(
                    f"the training step cannot be captured: {self.place(node)} calls {op}, whose result {index} is no dense tensor of fixed size"
                )
            outputs.append(self.value(node.name if len(listed) == 1 else f"{node.name}.{index}", result, base))
        for index, position in operator(op).updates:  # what is updated in place keeps its dtype, whatever the fake kernel says
            made, given = outputs[index], node.args[position]
            if made is not None and isinstance(given, torch.fx.Node):
                outputs[index] = replace(made, dtype=self.values[self.known[given].name].dtype)
        self.values.update((v.name, v) for v in outputs if v is not None)
        module, source = self.location(node)
        self.origin.update((v.name, (module, source)) for v in outputs if v is not None)
        args = tuple(self.arg(a) for a in node.args)
        kwargs = {k: self.arg(v) for k, v in node.kwargs.items() if k != "pin_memory"}
        rng_in = rng_out = None
        if self.draws(op, node):
            chain = (node.meta.get("custom") or {}).get("generator", "default")
            if chain != "default":
                kwargs["generator"] = Const("generator", chain)
            rng_in = self.random[chain] if chain in self.random else self.start_random(chain)
            rng_out = self.random[chain] = self.random_state()
        self.nodes.append(Node(op, args, tuple(kwargs.items()), tuple(outputs), _phase(node), module, source, rng_in, rng_out))
        refs = tuple(None if v is None else Ref(v.name) for v in outputs)
        self.known[node] = refs if isinstance(results, (tuple, list)) else refs[0]

    def mark(self, node: torch.fx.Node) -> None:
        """The mark of an identity, if a user put it there, goes to the node that made the storage of its argument."""
        custom = node.meta.get("custom") or {}
        if "mark" not in custom or _phase(node) == "backward":
            return
        root = self.values[self.known[node].name].root
        call = f"packhorse.{custom['mark']} in {self.place(node)}"
        given = next((i for i in self.inputs if i.value.name == root), None)
        if given is not None:
            raise CaptureError(
                f"the training step cannot be captured: {call} marks {given.role} {given.target!r} itself, or a view of it, which is there all the "
                "time: nothing is kept or recomputed; take the mark away, or put it on what is computed from it"
            )
        index = next(i for i in reversed(range(len(self.nodes))) if any(v is not None and v.name == root for v in self.nodes[i].outputs))
        made = self.nodes[index]
        if made.mark not in ("", custom["mark"]):
            raise CaptureError(
                f"the training step cannot be captured: {call} marks what is marked with packhorse.{made.mark} already: results of {made.op}, in "
                f"{place_of(made.module, made.source)} (views, and all results of one operator, are kept or recomputed together); leave one mark"
            )
        self.nodes[index] = replace(made, mark=custom["mark"], mark_name=custom["mark_name"])
        self.marked.add((custom["module"], custom["source"]))

    def start_random(self, chain: str) -> str:
        name = self.random_state()
        self.inputs.append(Input(Value(name, "rng", (), ()), "random", chain))
        return name

    def random_state(self) -> str:
        """The name of another random state. Names that are made up begin with a dot, which no module path, batch leaf or fx node does."""
        self.num_states += 1
        return f".rng{self.num_states - 1}"

    def draws(self, op: str, node: torch.fx.Node) -> bool:
        """Whether the call advances a generator."""
        assert isinstance(node.target, torch._ops.OpOverload)
        if op == "aten.native_dropout.default" and node.args[2] is False:
            return False
        return torch.Tag.nondeterministic_seeded in node.target.tags and op not in _TAGGED_BUT_STEADY

    def viewed(self, node: torch.fx.Node, op: str) -> Value | None:
        """The value whose memory the results share; None if they are fresh."""
        if op not in _SILENT_VIEWS:
            assert isinstance(node.target, torch._ops.OpOverload)
            info = node.target._schema.returns[0].alias_info if node.target._schema.returns else None
            if info is None:
                return None
        first = node.args[0]
        assert isinstance(first, torch.fx.Node), op
        return self.values[self.known[first].name]

    def view_again(self, node: torch.fx.Node) -> Any:
        """The results of a view, on tensors that lie as ours do."""

        def ours(source: torch.fx.Node) -> torch.Tensor:
            value = self.values[self.known[source].name]
            storage = torch.empty(self.values[value.root].extent_bytes, dtype=torch.uint8, device="meta").view(LONG[value.dtype])
            return storage.as_strided(value.shape, value.strides, value.offset // LONG[value.dtype].itemsize)

        assert callable(node.target)
        return node.target(*torch.fx.map_arg(node.args, ours), **torch.fx.map_arg(node.kwargs, ours))

    def value(self, name: str, result: torch.Tensor, base: Value | None) -> Value:
        name, shape, strides = self.unique(name), tuple(result.shape), tuple(result.stride())
        if base is None:
            value = Value(name, SHORT[result.dtype], shape, strides)
            if value.is_dense:
                return value
            self.relaid.add(name)
            return replace(value, strides=contiguous_strides(shape))
        # storage_offset counts from the start of the fake storage, where every root of this graph begins
        return Value(name, SHORT[result.dtype], shape, strides, base.root, int(result.storage_offset()) * result.element_size())

    # -- arguments and places -------------------------------------------------------------------------------------------------------

    def arg(self, arg: Any) -> Arg:
        if isinstance(arg, torch.fx.Node):
            return self.known[arg]
        if isinstance(arg, (list, tuple, torch.Size)):
            return tuple(self.arg(item) for item in arg)
        if arg is None or isinstance(arg, (bool, int, float, str)):
            return arg
        const = to_const(arg)
        if const is None:
            raise CaptureError(
                f"the training step cannot be captured: an operator has an argument of type {type(arg).__name__}, which packhorse cannot keep"
            )
        return const

    def location(self, node: torch.fx.Node) -> tuple[str, str]:
        custom = node.meta.get("custom") or {}
        if "source" in custom:
            return custom.get("module", ""), custom["source"]
        # a sum of gradients that autograd inserted itself: it belongs to where its first term came from
        for source in node.all_input_nodes:
            ref = self.known.get(source)
            if isinstance(ref, Ref) and ref.name in self.origin:
                return self.origin[ref.name]
        return "", ""

    def place(self, node: torch.fx.Node) -> str:
        return place_of(*self.location(node))


def _phase(node: torch.fx.Node) -> str:
    return "backward" if node.meta.get("partitioner_tag") == "is_backward" or node.meta.get("autograd_backward") else "forward"


def convert(name: str, trace: Trace) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The graph, and the constant tensors that the model's code made outside of it (input role "constant").

    Outputs: ("metric", "loss"), ("grad", parameter) for each parameter with a gradient, ("buffer", name) for each buffer that the step changes.
    """
    make = _Converter(name, trace)
    placeholders = iter(trace.inputs)
    outputs: list[Output] = []
    for node in trace.module.graph.nodes:
        if node.op == "placeholder":
            role, target = next(placeholders, ("constant", "seed"))
            make.placeholder(node, role, target)
        elif node.op == "get_attr":
            tensor = getattr(trace.module, node.target)
            if not isinstance(tensor, torch.Tensor):
                raise CaptureError(
                    f"the training step cannot be captured: {make.place(next(iter(node.users)))} uses a {type(tensor).__name__} of its own where "
                    "packhorse cannot keep it (a torch.Generator in the backward of an autograd.Function, for example); hand it to a function of "
                    "torch in a forward pass, or draw from the default generator"
                )
            if tensor.requires_grad:
                raise CaptureError(
                    "the training step cannot be captured: it uses a tensor that requires a gradient but is no parameter of the model (of shape "
                    f"{list(tensor.shape)}), which a plan would never train; register it on the model, or detach() it where it is used"
                )
            make.constants[node.target] = tensor.detach().clone()
            make.known[node] = Ref(make.add_input(tensor, "constant", node.target, node.target))
        elif node.op == "call_function":
            make.call(node)
        elif node.op == "output":
            outputs = _outputs(make, node, trace)
    outputs += [Output(state, "random", chain) for chain, state in make.random.items()]
    if lost := sorted(trace.marks - make.marked):
        raise CaptureError(
            f"the training step cannot be captured: nothing that the loss depends on uses what packhorse.keep or packhorse.drop returns in "
            f'{place_of(*lost[0])}; write h = packhorse.keep(h, "name") and go on with h, or take the mark away'
        )
    return Graph(name, tuple(make.inputs), tuple(make.nodes), tuple(outputs)), make.constants


def _outputs(make: _Converter, node: torch.fx.Node, trace: Trace) -> list[Output]:
    outputs: list[Output] = []
    results: Any = node.args[0]
    for result, desc in zip(results, node.meta["desc"]):
        if result is None:
            continue
        name = make.known[result].name
        kind = type(desc).__name__
        if kind == "PlainAOTOutput":
            outputs.append(Output(name, "metric", "loss"))
        elif kind == "GradAOTOutput":
            outputs.append(Output(name, "grad", trace.inputs[desc.grad_of.idx][1]))
        elif kind == "InputMutationAOTOutput":
            role, target = trace.inputs[desc.mutated_input.idx]
            if role != "buffer":
                raise CaptureError(
                    f"the training step cannot be captured: the model writes into its {role} {target!r} in place; work on a copy "
                    f"({target}.clone()), so that the step can be run again on the same {role}"
                )
            outputs.append(Output(name, "buffer", target))
        else:
            raise CaptureError(f"the training step cannot be captured: it has an output of kind {kind}, which packhorse does not know")
    return outputs
