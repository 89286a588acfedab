"""What people recompute with in PyTorch: each rival is a way to walk through the blocks of a `Chain`, on the same parameters.

A rival whose library or compiler is missing says so when it is made; nothing here decides what is measured.
"""

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from packhorse.bench.chains import Chain
from packhorse.errors import UserError

Forward = Callable[..., Tensor]  # forward(**batch) -> loss
Walk = Callable[[Any, Any], Any]  # (blocks, what the first takes) -> what the last gives


@dataclass(frozen=True)
class Rival:
    """make(model) -> its forward pass, or UserError if what it needs is not installed.

    share: of the saved bytes, that it is asked to keep (None: it takes no budget). compiled: torch.compile has it whole or in part. settings:
    makes the context in which its first steps run.
    """

    family: str
    name: str
    make: Callable[[Chain], Forward]
    share: float | None = None
    compiled: bool = False
    settings: Callable[[], AbstractContextManager] = field(default=nullcontext)


def rivals(model: Chain, *, inductor: bool = True, aot: bool = True, quick: bool = False) -> list[Rival]:
    """All rivals for a model of len(model.blocks) blocks, eager PyTorch first. quick: one or two of each family, nothing through inductor."""
    found = [Rival("eager", "eager", lambda m: m)]
    found += [*_by_hand(len(model.blocks), quick), *_selective(quick), *_torch_remat(model, quick)]
    if aot:
        found += list(_budgets("aot_eager_decomp_partition", (1.0, 0.5, 0.0) if quick else SHARES, ("dp",) if quick else SOLVERS))
    if inductor and not quick:
        found += _compiled()
        found += list(_budgets("inductor", SHARES, SOLVERS))
    return found


SHARES = (1.0, 0.7, 0.5, 0.3, 0.1, 0.0)
SOLVERS = ("dp", "greedy")


def walking(walk: Walk) -> Callable[[Chain], Forward]:
    """The model with another way through its blocks."""

    def make(model: Chain) -> Forward:
        def forward(inputs: Tensor, labels: Tensor) -> Tensor:
            return model.last(walk(model.blocks, model.first(inputs, labels)), labels)

        return forward

    return make


# -- torch.utils.checkpoint, where people put it ------------------------------------------------------------------------------------


def every(blocks: Sequence[nn.Module], x: Any, *, size: int, **settings: Any) -> Any:
    """Each run of `size` blocks is one checkpointed region."""
    for start in range(0, len(blocks), size):
        x = checkpoint(nn.Sequential(*list(blocks)[start : start + size]), x, use_reentrant=False, **settings)
    return x


def first_blocks(blocks: Sequence[nn.Module], x: Any, *, count: int) -> Any:
    """The first `count` blocks are checkpointed one by one, the others keep everything."""
    for place, block in enumerate(blocks):
        x = checkpoint(block, x, use_reentrant=False) if place < count else block(x)
    return x


def nested(blocks: Sequence[nn.Module], x: Any, *, size: int) -> Any:
    """Two levels: regions of `size` blocks, in each of which every block is a region again."""
    for start in range(0, len(blocks), size):
        x = checkpoint(partial(every, list(blocks)[start : start + size], size=1), x, use_reentrant=False)
    return x


def _by_hand(depth: int, quick: bool) -> Iterator[Rival]:
    for size in (1,) if quick else (1, 2, 3, 4, 6):
        yield Rival("checkpoint every k", "every block" if size == 1 else f"every {size} blocks", walking(partial(every, size=size)))
    for segments in (max(depth // 2, 2),) if quick else range(2, depth + 1):
        walk: Walk = lambda blocks, x, s=segments: checkpoint_sequential(blocks, s, x, use_reentrant=False)  # type: ignore[misc] # noqa: E731
        yield Rival("checkpoint_sequential", f"checkpoint_sequential, {segments} segments", walking(walk))
    counts = (depth // 2,) if quick else sorted({depth * eighths // 8 for eighths in range(1, 8)} - {0})
    for count in counts:
        yield Rival("first m blocks", f"first {count} of {depth} blocks", walking(partial(first_blocks, count=count)))
    for size in (2,) if quick else (3, 5, 8):
        yield Rival("nested", f"nested {size} x 1", walking(partial(nested, size=size)))


# -- selective policies --------------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default)
_ATTENTION = (_aten._scaled_dot_product_flash_attention_for_cpu.default,)


def _keeping(operators: tuple[Any, ...]) -> Walk:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(every, size=1, context_fn=partial(create_selective_checkpoint_contexts, policy))


def _selective(quick: bool) -> Iterator[Rival]:
    yield Rival("selective policy", "keep products", walking(_keeping(_PRODUCTS)))
    if not quick:
        yield Rival("selective policy", "keep products and attention", walking(_keeping(_PRODUCTS + _ATTENTION)))
        yield Rival("selective policy", "keep attention", walking(_keeping(_ATTENTION)))


# -- torch_remat ---------------------------------------------------------------------------------------------------------------------


def _remat() -> Any:
    try:
        import torch_remat
    except ImportError:
        raise UserError("not installed: pip install torch-remat") from None
    return torch_remat


def _marked(block: Any, x: Tensor, *, keep: str) -> Tensor:
    """packhorse.models.gpt.Block.forward with one of its two halves marked to be kept."""
    remat = _remat()
    for half, norm in (("attention", block.norm_attention), ("feed_forward", block.norm_feed_forward)):
        out = remat.region(getattr(block, half), half, recompute=half != keep)(norm(x))
        if half == keep:
            remat.recompute_needs_tensor(out)
        x = x + block.dropout(out)
    return x


def _rematerialized(keep: str | None) -> Callable[[Chain], Forward]:
    def walk(blocks: Sequence[nn.Module], x: Any) -> Any:
        for place, block in enumerate(blocks):
            run = block if keep is None else partial(_marked, block, keep=keep)
            x = _remat().checkpoint(region_name=f"blocks.{place}")(run)(x)
        return x

    def make(model: Chain) -> Forward:
        _remat()  # a missing library is said here
        return walking(walk)(model)

    return make


def _torch_remat(model: Chain, quick: bool) -> Iterator[Rival]:
    yield Rival("torch_remat", "torch_remat, every block", _rematerialized(None))
    if not quick and all(hasattr(block, "norm_feed_forward") for block in model.blocks):
        yield Rival("torch_remat", "torch_remat, attention kept", _rematerialized("attention"))
        yield Rival("torch_remat", "torch_remat, feed-forward kept", _rematerialized("feed_forward"))


# -- torch.compile -------------------------------------------------------------------------------------------------------------------


def _code_of_its_own(function: Callable) -> Callable:
    """The same function as another code object: torch.compile keeps its results by code object and would take a rival's graph for another's."""
    copied = types.FunctionType(
        function.__code__.replace(co_name=f"{function.__name__}_"), function.__globals__, function.__name__, None, function.__closure__
    )
    return copied


def _whole(model: Chain, *, backend: str, walk: Walk | None = None) -> Forward:
    if walk is None:

        def forward(inputs: Tensor, labels: Tensor) -> Tensor:
            return model(inputs, labels)

        return torch.compile(_code_of_its_own(forward), backend=backend)
    return torch.compile(_code_of_its_own(walking(walk)(model)), backend=backend)


def _blockwise(model: Chain, *, checkpointed: bool) -> Forward:
    compiled = [torch.compile(block) for block in model.blocks]

    def walk(blocks: Sequence[nn.Module], x: Any) -> Any:
        for block in compiled:
            x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
        return x

    return walking(walk)(model)


@contextmanager
def compiler_settings(**functorch: Any) -> Iterator[None]:
    """Inside it torch.compile works in this process, under these settings of torch._functorch.config."""
    import torch._functorch.config
    import torch._inductor.config

    with torch._functorch.config.patch(functorch), torch._inductor.config.patch({"compile_threads": 1}):
        yield


def _compiled() -> list[Rival]:
    return [
        Rival("torch.compile", "compile(block)", partial(_blockwise, checkpointed=False), None, True, compiler_settings),
        Rival("torch.compile", "checkpoint(compile(block))", partial(_blockwise, checkpointed=True), None, True, compiler_settings),
        Rival("torch.compile", "compile(all, every block checkpointed)", partial(_whole, backend="inductor", walk=partial(every, size=1)),
              None, True, compiler_settings),
    ]  # fmt: skip


def _budgets(backend: str, shares: Sequence[float], solvers: Sequence[str]) -> Iterator[Rival]:
    """torch.compile with torch._functorch.config.activation_memory_budget: the share of the saved bytes that may be kept.

    At 0 and 1 no solver is asked, so there they are one rival.
    """
    short = "inductor" if backend == "inductor" else "aot_eager"
    for share in shares:
        for solver in solvers if 0 < share < 1 else solvers[:1]:
            settings = partial(compiler_settings, activation_memory_budget=share, activation_memory_budget_solver=solver)
            name = f"{short}, budget {share:g}{f', {solver}' if 0 < share < 1 else ''}"
            yield Rival(f"activation_memory_budget, {short}", name, partial(_whole, backend=backend), share, True, settings)
