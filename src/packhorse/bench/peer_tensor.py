"""What people split a model's matrices over ranks with in PyTorch, and packhorse beside it, each as a function that takes one step.

Every rank sees the samples of all ranks. The model is the same GPT as in peer_systems. For the rivals its attention is told to go as far as a rank's
heads, and its fused projection has its rows in the order of the ranks, so that a rank's part is queries, keys and values of the same heads. packhorse
gets it as it is.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from packhorse.bench.peer_systems import ADAMW, CLIP_NORM, OURS, Batch, Make, System, TakeStep, packhorse_step, plain_step, recompute_blocks


class HeadsOfARank(nn.Module):
    """The attention of packhorse.models.gpt with the heads that `qkv` gives, of `num_ranks` ranks that share them: x (B, T, D) -> (B, T, D / ranks)
    into `out`."""

    def __init__(self, whole: Any, num_ranks: int) -> None:
        super().__init__()
        self.heads = whole.heads // num_ranks
        self.qkv, self.out = whole.qkv, whole.out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def in_order_of_ranks(fused: Tensor, num_ranks: int) -> Tensor:
    """(3 D, ...), all queries, all keys, all values -> those of the first rank's heads, those of the second's, ..."""
    return fused.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2)


def _heads_by_rank(model: Any, num_ranks: int) -> None:
    """The model's attention becomes that of some heads, whose number its projection decides."""
    for block in model.blocks:
        block.attention = HeadsOfARank(block.attention, num_ranks)
        for parameter in block.attention.qkv.parameters():
            parameter.data = in_order_of_ranks(parameter.data, num_ranks)


def _clip(grads: Iterable[list[Tensor]], norm: Tensor) -> None:
    """Scales gradients, in lists of one kind each, as torch.nn.utils.clip_grad_norm_ does."""
    scale = torch.clamp(CLIP_NORM / (norm + 1e-6), max=1.0)
    for those in grads:
        torch._foreach_mul_(those, scale)


def _dtensor(sequence: bool = False, recompute: bool = False) -> Make:
    """parallelize_module, with the loss of a vocabulary in parts. sequence: norms and sums of a part of the sequence too."""

    def make(model: Any, settings: dict[str, Any]) -> TakeStep:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            loss_parallel,
            parallelize_module,
        )

        _heads_by_rank(model, dist.get_world_size())
        if recompute:
            recompute_blocks(model)
        between = Shard(1) if sequence else Replicate()
        of_block: dict[str, Any] = {
            "attention.qkv": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=between),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.out": RowwiseParallel(output_layouts=between),
        }
        plan: dict[str, Any] = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        }
        if sequence:
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            of_block |= {name: SequenceParallel() for name in ("norm_attention", "norm_feed_forward")}
            of_block |= {name: whole for name in ("attention", "feed_forward")}
            plan |= {"positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)), "norm": SequenceParallel()}
        for index in range(len(model.blocks)):
            plan |= {f"blocks.{index}.{name}": style for name, style in of_block.items()}
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
        model.head.weight = model.tokens.weight  # which parallelize_module has untied
        # neither a fused optimizer nor a norm takes both kinds at once
        kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == kind] for kind in (True, False)]
        kinds = [those for those in kinds if those]

        def clip() -> None:
            grads = [[p.grad for p in those if p.grad is not None] for those in kinds]
            norms = [nn.utils.get_total_norm(those) for those in grads]
            total = torch.linalg.vector_norm(torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]))
            _clip([[g.to_local() if isinstance(g, DTensor) else g for g in those] for those in grads], total)

        optimizer = torch.optim.AdamW([{"params": those} for those in kinds], **ADAMW)
        inner = plain_step(model, optimizer, clip)

        def step(batch: Batch) -> Tensor:
            with loss_parallel():
                return inner(batch).full_tensor()  # type: ignore[attr-defined]

        return step

    return make


class OutputOnly(nn.Module):
    """A layer of Megatron-core, which also returns a bias that somebody else is to add, and here is None."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


class GPTOfParts(nn.Module):
    """packhorse.models.gpt.GPT with the loss of Megatron-core, of logits of which each rank has a part of the vocabulary."""

    def __init__(self, whole: Any, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions, self.blocks, self.norm, self.head = whole.tokens, whole.positions, whole.blocks, whole.norm, whole.head
        self.loss = loss

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), labels).mean()


def _megatron(recompute: bool = False) -> Make:
    """Megatron-core's layers of a rank, and its loss."""

    def make(model: Any, settings: dict[str, Any]) -> TakeStep:
        from megatron.core import ModelParallelConfig, parallel_state
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            RowParallelLinear,
            VocabParallelEmbedding,
            vocab_parallel_cross_entropy,
        )

        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=num_ranks)
        config = ModelParallelConfig(
            tensor_model_parallel_size=num_ranks, use_cpu_initialization=True, perform_initialization=False, gradient_accumulation_fusion=False
        )
        settings_of_all: dict[str, Any] = {"config": config, "init_method": nn.init.zeros_}
        cut: set[nn.Parameter] = set()

        def fill(parameter: nn.Parameter, whole: Tensor, dim: int | None) -> None:
            """A rank's part of the whole along a dim, or all of it."""
            parameter.data.copy_(whole.data if dim is None else whole.data.chunk(num_ranks, dim)[rank])
            if dim is not None:
                cut.add(parameter)

        def column(linear: nn.Linear) -> nn.Module:
            layer = ColumnParallelLinear(
                linear.in_features, linear.out_features, bias=linear.bias is not None, gather_output=False, **settings_of_all
            )
            fill(layer.weight, linear.weight, 0)
            if linear.bias is not None:
                fill(layer.bias, linear.bias, 0)
            return OutputOnly(layer)

        def row(linear: nn.Linear) -> nn.Module:
            layer = RowParallelLinear(
                linear.in_features, linear.out_features, bias=True, input_is_parallel=True, skip_bias_add=False, **settings_of_all
            )
            fill(layer.weight, linear.weight, 1)
            fill(layer.bias, linear.bias, None)
            return OutputOnly(layer)

        _heads_by_rank(model, num_ranks)
        tokens = VocabParallelEmbedding(model.tokens.num_embeddings, model.tokens.embedding_dim, **settings_of_all)
        fill(tokens.weight, model.tokens.weight, 0)
        model.tokens, model.head = tokens, column(model.head)
        model.head.layer.weight = tokens.weight
        for block in model.blocks:
            block.attention.qkv, block.attention.out = column(block.attention.qkv), row(block.attention.out)
            block.feed_forward.up, block.feed_forward.out = column(block.feed_forward.up), row(block.feed_forward.out)
        if recompute:
            recompute_blocks(model)
        parts = GPTOfParts(model, vocab_parallel_cross_entropy)
        kinds = [[p for p in parts.parameters() if (p in cut) == kind] for kind in (True, False)]

        def clip() -> None:
            of_parts, of_wholes = ([p.grad for p in those if p.grad is not None] for those in kinds)
            square = nn.utils.get_total_norm(of_parts).square()
            dist.all_reduce(square)
            _clip([of_parts, of_wholes], (square + nn.utils.get_total_norm(of_wholes).square()).sqrt())

        return plain_step(parts, torch.optim.AdamW(parts.parameters(), **ADAMW), clip)

    return make


_DTENSOR: dict[str, Any] = {"tensor": True, "imports": ("torch.distributed.tensor.parallel",)}
_MEGATRON: dict[str, Any] = {"tensor": True, "package": "megatron", "imports": ("megatron.core.tensor_parallel",)}
_OURS: dict[str, Any] = {"tensor": True, "ours": True, "imports": OURS}

TENSOR_SYSTEMS = (
    System("DTensor", None, _dtensor(), **_DTENSOR),
    System("DTensor, sequence parallel", None, _dtensor(sequence=True), sequence=True, **_DTENSOR),
    System("DTensor, every block checkpointed", None, _dtensor(recompute=True), recompute=True, **_DTENSOR),
    System("Megatron-core", None, _megatron(), **_MEGATRON),
    System("Megatron-core, every block checkpointed", None, _megatron(recompute=True), recompute=True, **_MEGATRON),
    System("packhorse tp", None, packhorse_step("tp"), **_OURS),
    System("packhorse tp, sequence parallel", None, packhorse_step("tp", sequence_parallel=True), sequence=True, **_OURS),
    System("packhorse tp, in a budget", None, packhorse_step("tp", recompute="auto"), **_OURS),
    System("packhorse tp, dropping what is cheap", None, packhorse_step("tp", recompute="cheap"), **_OURS),
    System("packhorse tp, recomputing", None, packhorse_step("tp", recompute="optimal"), recompute=True, **_OURS),
)
