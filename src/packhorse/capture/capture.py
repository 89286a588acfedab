"""nn.Module + batch + loss -> the graphs of one training step, as this rank sees it. The first arrow of the pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from packhorse.capture.convolution import plain_convolutions
from packhorse.capture.dtypes import SHORT, to_const
from packhorse.capture.questions import Questions
from packhorse.capture.stamp import Whole, captured_whole, stamped
from packhorse.capture.trace import dense_strides, device_of, distinct
from packhorse.errors import CaptureError
from packhorse.graph.accumulate import first_micro_batch, next_micro_batch
from packhorse.graph.collector import no_search_for_cycles
from packhorse.graph.embedding_rows import embedding_in_rows
from packhorse.graph.grad_dtype import gradients_in
from packhorse.graph.ir import Const, Graph, Value
from packhorse.graph.own_outputs import own_outputs
from packhorse.graph.verify import verify
from packhorse.parallel.part import part_of
from packhorse.parallel.split import Sharding
from packhorse.parallel.tensor.split_graph import split_graph
from packhorse.parallel.tensor.spread import Gathered


@dataclass(frozen=True)
class Captured:
    """micro: forward and backward of one micro-batch. first, next: the same as the first and as a later micro-batch of the step (next is None
    for one micro-batch). constants: tensors that the model's code made outside the graph. questions: what the model asked of this batch; the graphs
    hold for batches that give the same answers. generators: name -> each torch.Generator that the model has or draws from, besides torch's own.
    gathered: of several tensor parallel ranks, the split values that an operator needs whole."""

    micro: Graph
    first: Graph
    next: Graph | None
    constants: dict[str, torch.Tensor]
    questions: Questions
    generators: dict[str, torch.Generator]
    gathered: tuple[Gathered, ...] = ()

    def loss(self) -> Value:
        """The value of the loss."""
        return next(self.micro.values[out.name] for out in self.micro.outputs if (out.role, out.target) == ("metric", "loss"))

    def micro_batches(self, names: Sequence[str]) -> dict[str, Graph | None]:
        """Program name -> its graph. Those after "first" are the same graph, of a later micro-batch."""
        return {name: self.first if name == "first" else self.next and replace(self.next, name=name) for name in names}

    def trained(self) -> set[str]:
        """Names of the parameters that get a gradient."""
        return {out.target for out in self.micro.outputs if out.role == "grad"}


def capture(
    model: torch.nn.Module,
    batch: Any,
    loss: Callable | None,
    num_micro_batches: int = 1,
    compute: torch.dtype | None = None,
    grads: torch.dtype | None = None,
    adds_gradients: bool = True,
    sharding: Sharding | None = None,
    whole: Whole | None = None,
) -> Captured:
    """The step's graphs. Nothing is allocated, the model is left as it is and may be on meta.

    compute: dtype to compute in (capture/precision.py), grads: to keep gradients in; None: as the model is, and as they come. adds_gradients: a
    later micro-batch adds its gradients to those before; False where a pass does that on shards. sharding: of several tensor parallel ranks, which
    parameters are split; the graphs are those of one of the ranks. whole: what `capture_whole` gave for the same model and batch.

    Raises CaptureError naming module and line if the step cannot be one graph, BatchError for a batch of another kind.
    """
    with no_search_for_cycles():
        return _capture(model, whole or capture_whole(model, batch, loss, compute), num_micro_batches, grads, adds_gradients, sharding)


def capture_whole(model: torch.nn.Module, batch: Any, loss: Callable | None, compute: torch.dtype | None = None) -> Whole:
    """The graph of one micro-batch, forward and backward, as one rank would run it. Raises what `capture` raises."""
    if not any(p.requires_grad for p in model.parameters()):
        raise CaptureError(
            "no parameter of the model requires a gradient, so there is nothing to train; unfreeze some (parameter.requires_grad_(True))"
        )
    with no_search_for_cycles():
        return stamped("micro", model, batch, loss, True, compute) or captured_whole("micro", model, batch, loss, True, compute)


def _capture(
    model: torch.nn.Module,
    whole: Whole,
    num_micro_batches: int,
    grads: torch.dtype | None,
    adds_gradients: bool,
    sharding: Sharding | None,
) -> Captured:
    micro = plain_convolutions(whole.graph, device_of(model))
    micro = embedding_in_rows(micro)
    gathered: list[Gathered] = []
    if sharding is not None:
        micro, gathered = split_graph(micro, sharding)
    if grads is not None:
        micro = gradients_in(micro, SHORT[grads], cast(Const, to_const(grads)))
    micro = own_outputs(micro)
    verify(micro)
    if not any(out.role == "grad" for out in micro.outputs):
        raise CaptureError(
            "no parameter gets a gradient: the loss does not depend on any that is trained (a detach(), a no_grad block, or a loss made of something "
            "else?); check that loss.backward() fills some parameter's .grad in plain PyTorch"
        )
    parameters = distinct(model.named_parameters(remove_duplicate=False))
    strides = {name: dense_strides(p) for name, p in parameters.items()}
    if sharding is not None:
        for name, split in sharding.splits.items():
            strides[name] = part_of(tuple(parameters[name].shape), strides[name], split, sharding.degree, sharding.rank).local_strides
    later = next_micro_batch(micro, num_micro_batches, strides if adds_gradients else None) if num_micro_batches > 1 else None
    return Captured(micro, first_micro_batch(micro, num_micro_batches), later, whole.constants, whole.questions, whole.generators, tuple(gathered))


def capture_evaluation(
    model: torch.nn.Module, batch: Any, loss: Callable | None, compute: torch.dtype | None = None, sharding: Sharding | None = None
) -> tuple[Graph, dict[str, torch.Tensor], Questions, dict[str, torch.Generator]]:
    """The forward pass alone, in the model's current mode, without gradients; constants, questions and generators as in Captured.

    Output: ("metric", "loss"); changes of buffers are left out.
    """
    whole = stamped("evaluate", model, batch, loss, False, compute) or captured_whole("evaluate", model, batch, loss, False, compute)
    graph = whole.graph
    graph = replace(graph, outputs=tuple(out for out in graph.outputs if out.role == "metric"))  # an evaluation changes nothing
    graph = plain_convolutions(graph, device_of(model))
    if sharding is not None:
        graph, _ = split_graph(graph, sharding)
    return own_outputs(graph), whole.constants, whole.questions, whole.generators
