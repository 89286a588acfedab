"""What people shard training with in PyTorch, each as a function that takes one step: the same GPT, AdamW (fused), gradients clipped at norm 1.

A system is made inside a process of a job of several ranks, after torch.distributed was initialised. What is imported from a library that not
everybody has is imported there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CLIP_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
BUCKET_ELEMENTS = 4_000_000  # of DeepSpeed: its default takes 2 GB whatever the model

Batch = dict[str, Tensor]
TakeStep = Callable[[Batch], Tensor]  # (this rank's batch) -> its loss, or the mean over ranks
Make = Callable[[nn.Module, dict[str, Any]], TakeStep]
OURS = ("packhorse.api", "ortools.sat.python.cp_model")


@dataclass(frozen=True)
class System:
    """stage: of ZeRO, that it is compared at (None: no rival, a measure). recompute: the backward pass computes blocks again. tensor: it splits the
    matrices over ranks, each of which sees the batches of all; sequence: and what lies between the matrices, along the sequence. make(model,
    settings) -> its step; settings are for packhorse alone. package: what has to be installed besides torch. imports: modules that are no memory of
    training."""

    name: str
    stage: int | None
    make: Make
    recompute: bool = False
    ours: bool = False
    tensor: bool = False
    sequence: bool = False
    package: str = ""
    imports: tuple[str, ...] = ()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], Any]) -> TakeStep:
    """Forward, backward, clip(), the optimizer."""

    def step(batch: Batch) -> Tensor:
        loss = model(**batch)
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _clipping(model: nn.Module) -> Callable[[], Any]:
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)


def _alone(model: nn.Module, settings: dict[str, Any]) -> TakeStep:
    return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW), _clipping(model))


def _ddp(model: nn.Module, settings: dict[str, Any]) -> TakeStep:
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return plain_step(wrapped, torch.optim.AdamW(wrapped.parameters(), **ADAMW), _clipping(wrapped))


def _zero_redundancy(model: nn.Module, settings: dict[str, Any]) -> TakeStep:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW)
    return plain_step(wrapped, optimizer, _clipping(wrapped))


def _fsdp1(strategy: str) -> Make:
    def make(model: nn.Module, settings: dict[str, Any]) -> TakeStep:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in _blocks(model)}),
            use_orig_params=True,
            sharding_strategy=ShardingStrategy[strategy],
            device_id=torch.device("cpu"),
        )
        return plain_step(wrapped, torch.optim.AdamW(wrapped.parameters(), **ADAMW), lambda: wrapped.clip_grad_norm_(CLIP_NORM))

    return make


def _fsdp2(reshard: bool, recompute: bool = False) -> Make:
    def make(model: nn.Module, settings: dict[str, Any]) -> TakeStep:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if recompute:
            recompute_blocks(model)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in _blocks(model):
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
        return plain_step(model, torch.optim.AdamW(model.parameters(), **ADAMW), _clipping(model))

    return make


def _deepspeed(stage: int) -> Make:
    def make(model: nn.Module, settings: dict[str, Any]) -> TakeStep:
        import deepspeed

        zero = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": BUCKET_ELEMENTS, "allgather_bucket_size": BUCKET_ELEMENTS}
        if stage == 3:
            zero["stage3_prefetch_bucket_size"] = BUCKET_ELEMENTS
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP_NORM,
            "steps_per_print": 10**9,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
        }
        engine = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), **ADAMW), config=config)[0]

        def step(batch: Batch) -> Tensor:
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return step

    return make


def packhorse_step(axis: str, stage: int = 0, recompute: str = "none", sequence_parallel: bool = False) -> Make:
    """packhorse with all ranks along one axis of the mesh. recompute: a method; "optimal" has the budget of the settings, "auto" their share.
    They plan with the device file of the settings."""

    def make(model: nn.Module, settings: dict[str, Any]) -> TakeStep:
        import packhorse

        plan = packhorse.plan(
            model,
            settings["batch"],
            optimizer=torch.optim.AdamW(model.parameters(), **ADAMW),
            clip_norm=CLIP_NORM,
            mesh=packhorse.Mesh(**{axis: dist.get_world_size()}),
            rank=dist.get_rank(),
            zero_stage=stage,
            recompute=recompute,
            budget={"optimal": settings["budget"], "auto": settings["share"]}.get(recompute),
            sequence_parallel=sequence_parallel,
            device=settings["device"],
        )
        return packhorse.compile(model, plan)

    return make


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList)
    return list(blocks)


def recompute_blocks(model: nn.Module) -> None:
    """Every block keeps its input alone, as torch.utils.checkpoint does it."""
    for block in _blocks(model):
        block.forward = _checkpointed(block.forward)  # type: ignore[method-assign]


def _checkpointed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


SYSTEMS = (
    System("alone, no communication", None, _alone),
    System("DDP", 0, _ddp),
    System("DDP + ZeroRedundancyOptimizer", 1, _zero_redundancy),
    System("FSDP1 SHARD_GRAD_OP", 2, _fsdp1("SHARD_GRAD_OP")),
    System("FSDP2, kept gathered", 2, _fsdp2(False)),
    System("FSDP1 FULL_SHARD", 3, _fsdp1("FULL_SHARD")),
    System("FSDP2", 3, _fsdp2(True)),
    System("FSDP2, every block checkpointed", 3, _fsdp2(True, recompute=True), recompute=True),
    *(System(f"DeepSpeed {stage}", stage, _deepspeed(stage), package="deepspeed", imports=("deepspeed",)) for stage in range(4)),
    *(System(f"packhorse {stage}", stage, packhorse_step("dp", stage), ours=True, imports=OURS) for stage in range(4)),
    System("packhorse 3, recomputing", 3, packhorse_step("dp", 3, "optimal"), recompute=True, ours=True, imports=OURS),
)
