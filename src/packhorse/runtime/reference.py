"""The oracle: runs a Graph node by node, with no plan, on freshly allocated tensors. Every later stage must match it bit for bit."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Generator, Tensor

from packhorse.capture.dtypes import LONG, from_const
from packhorse.graph.embedding_rows import ADD_ROWS
from packhorse.graph.ir import Arg, Const, Graph, Node, Ref, Value
from packhorse.graph.operators import VIEWS, WAIT, computed_by_device, is_copy, is_tensor_collective, operator
from packhorse.parallel.tensor.spread import STREAMS
from packhorse.runtime.kernels import RECIPES, overload, pieces_of, takes_generator
from packhorse.runtime.optimizers import LiveGroup
from packhorse.runtime.random import drawing_as, drawing_from
from packhorse.runtime.vocabulary import VOCABULARY_RECIPES

aten = torch.ops.aten


def run_graph(
    graph: Graph,
    inputs: dict[str, Tensor],
    groups: list[LiveGroup] | None = None,
    watch: Callable[[Node, str, Tensor], Any] | None = None,
    generators: dict[str, Generator] | None = None,
) -> dict:
    """(role, target) -> tensor for every output but the random state. inputs: value name -> tensor; they are not changed.

    Random nodes draw from torch's default generator, or from the one of `generators` that they name, in order. watch(node, value name, tensor) sees
    every result.
    """
    table: dict[str, Any] = dict(inputs)
    with torch.no_grad():
        for node in graph.nodes:
            args = [_get(arg, table) for arg in node.args]
            kwargs = {key: _get(arg, table) for key, arg in node.kwargs}
            draws: AbstractContextManager = nullcontext()
            if node.generator != "default":
                assert generators is not None
                kwargs["generator"] = generators[node.generator]
                if node.generator in STREAMS:
                    draws = drawing_as(kwargs.pop("generator"))
                    kwargs |= {"generator": None} if takes_generator(node.op) else {}
            if "state" in kwargs:
                draws = drawing_from(kwargs.pop("state"), kwargs.get("generator"))
            with draws:
                results = _call(node, args, kwargs, groups, graph.values)
            for value, result in zip(node.outputs, results):
                if value is not None:
                    table[value.name] = result
                    if watch is not None:
                        watch(node, value.name, result)
    return {(o.role, o.target): table[o.name] for o in graph.outputs if o.role != "random"}


def _get(arg: Arg, table: dict[str, Any]) -> Any:
    if isinstance(arg, Ref):
        return table[arg.name]
    if isinstance(arg, Const):
        return None if arg.kind == "generator" else from_const(arg)
    if isinstance(arg, tuple):
        return [_get(item, table) for item in arg]
    return arg


def _call(node: Node, args: list, kwargs: dict, groups: list[LiveGroup] | None, values: dict) -> tuple | list:
    if node.op == "packhorse.nll_log_softmax_backward.default":
        grad_output, log_probs, target, weight, reduction, ignore_index, total_weight = args
        grad = aten.nll_loss_backward(grad_output, log_probs, target, weight, reduction, ignore_index, total_weight)
        return (aten._log_softmax_backward_data(grad, log_probs, 1, log_probs.dtype),)
    if node.op == "packhorse.grad_norm.default":
        grads, dtypes = args[0], kwargs["dtypes"]
        if "pieces" in kwargs:
            grads, dtypes = pieces_of(grads, dtypes, kwargs["pieces"])
        return (torch.nn.utils.get_total_norm([grad.to(LONG[name]) for grad, name in zip(grads, dtypes)]),)
    if node.op == ADD_ROWS:
        total, *rest = args
        return (total + aten.embedding_dense_backward(*rest, False),)
    if computed_by_device(node.op) == "packhorse.follow.default":
        master, copy = args
        return (torch.where(master.to(copy.dtype) != copy, copy.to(master.dtype), master),)
    if node.op == "packhorse.random_state.default":
        return ((kwargs.get("generator") or torch.default_generator).get_state(),)
    if node.op == "packhorse.clip_coefficient.default":
        return (torch.clamp(args[1] / (args[0] + 1e-6), max=1.0),)
    if node.op == "aten.native_dropout.default" and args[2] is not False and 0 < args[1] < 1 and not args[0].is_cuda:
        mask = torch.empty_like(args[0], dtype=torch.bool).bernoulli_(1 - args[1])
        return (args[0] * mask.to(args[0].dtype).div_(1 - args[1]), mask)
    if node.op == "aten.native_dropout_backward.default" and args[2] != 0 and not args[0].is_cuda:
        return (args[0] * args[1].to(args[0].dtype).div_(1 / args[2]),)
    if node.op == VIEWS:
        return [_at(args[0], value) for value in node.outputs if value is not None]
    if is_copy(node.op):
        return (args[0].clone(),)
    if node.op == WAIT:
        return ()
    if is_tensor_collective(node.op):
        if kwargs["ranks"] != 1:
            raise ValueError(f"{node.op} over {kwargs['ranks']} ranks: the oracle runs the graph of one rank alone; give it one that is not split")
        return [args[0].as_strided(value.shape, value.strides) for value in node.outputs if value is not None]
    if node.op in VOCABULARY_RECIPES:
        return _on_fresh(node, args, values)
    if node.op.startswith("packhorse."):
        return _optimize(node, args, kwargs, groups, values)
    results = overload(node.op)(*args, **kwargs)
    return results if isinstance(results, (tuple, list)) else (results,)


def _at(flat: Tensor, value: Value) -> Tensor:
    """A view of a flat tensor."""
    return flat.as_strided(value.shape, value.strides, flat.storage_offset() + value.offset // flat.element_size())


def _on_fresh(node: Node, args: list, values: dict) -> list:
    """The operator's recipe on results of its own (tests hold the recipe itself against plain PyTorch on the whole vocabulary)."""
    device, need = args[0].device, operator(node.op).scratch
    made = [torch.empty_strided(v.shape, v.strides, dtype=LONG[v.dtype], device=device) for v in node.outputs if v is not None]
    RECIPES[node.op](made, torch.empty(need(node, values) if need else 0, dtype=torch.uint8, device=device), *args)
    return made


def _optimize(node: Node, args: list, kwargs: dict, groups: list[LiveGroup] | None, values: dict) -> list:
    """The optimizer's recipe on copies of its arguments (tests hold the recipe itself against torch.optim)."""
    assert groups is not None
    copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    scratch = torch.empty(operator(node.op).scratch(node, values), dtype=torch.uint8)  # type: ignore[misc]
    kwargs = {key: value for key, value in kwargs.items() if key != "group"} | {"hyper": groups[kwargs["group"]]}
    RECIPES[node.op]([], scratch, *copies, **kwargs)
    return [copies[position] for _, position in operator(node.op).updates]


def first_nonfinite(graph: Graph, inputs: dict[str, Tensor], generators: dict[str, Generator]) -> str:
    """A sentence naming the first value with a NaN or +infinity, its module and line; "" if there is none. -infinity is what masks are made of."""
    found: list[str] = []

    def watch(node: Node, name: str, tensor: Tensor) -> None:
        if not found and _bad(tensor):
            kind = "NaN" if bool(torch.isnan(tensor).any()) else "infinity"
            found.append(
                f"{kind} first appears in the {node.phase} pass, in module {node.module or '(outermost)'!r} at {node.source or 'an unknown line'}: "
                f"%{name} = {node.op}"
            )

    given = [f"{i.role} {i.target}" for i in graph.inputs if i.role in ("param", "buffer", "batch") and _bad(inputs[i.value.name])]
    if given:
        return f"the step's own inputs hold NaN or infinity already: {', '.join(given[:5])}"
    run_graph(graph, inputs, watch=watch, generators=generators)
    return found[0] if found else ""


def _bad(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool((torch.isnan(tensor) | (tensor == float("inf"))).any())
