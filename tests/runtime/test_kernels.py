"""Every row of the operator table, against the operator itself: same bits into planned memory, in place, and without allocating."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from packhorse.graph.operators import OPERATORS
from packhorse.runtime.kernels import call_of, overload
from samples import sample

pytestmark = pytest.mark.cpu
UNDEFINED = {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default", "aten.new_empty_strided.default"}
ATEN = sorted(name for name, row in OPERATORS.items() if row.kind != "adopt" and name.startswith("aten.") and name not in UNDEFINED)
SCRATCH = torch.full((1 << 20,), 0xA5, dtype=torch.uint8)


def expected(op: str, args: tuple, kwargs: dict) -> list[Tensor]:
    torch.manual_seed(3)
    result = overload(op)(*args, **kwargs)
    return [result] if isinstance(result, Tensor) else list(result)


def run_recipe(op, outs, args, kwargs):
    function, called, named = call_of(op, outs, SCRATCH, args, kwargs)
    function(*called, **named)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("op", ATEN)
def test_recipe_writes_the_operators_own_bits(op):
    torch.manual_seed(1)
    args, kwargs = sample(op)
    wanted = expected(op, args, kwargs)
    outs = [torch.full_like(w, 77) for w in wanted]
    torch.manual_seed(3)
    run_recipe(op, outs, args, kwargs)
    assert all(same(got, want) for got, want in zip(outs, wanted))


@pytest.mark.parametrize("op,position", [(op, k) for op in ATEN for k in OPERATORS[op].in_place])
def test_recipe_may_overwrite_an_argument_that_dies(op, position):
    torch.manual_seed(1)
    args, kwargs = sample(op)
    wanted = expected(op, args, kwargs)
    assert args[position].shape == wanted[0].shape and args[position].stride() == wanted[0].stride()
    torch.manual_seed(3)
    run_recipe(op, [args[position], *(torch.empty_like(w) for w in wanted[1:])], args, kwargs)
    assert same(args[position], wanted[0])


@pytest.mark.parametrize("op", [op for op in ATEN if OPERATORS[op].kind == "out"])
def test_recipe_allocates_nothing(op):
    torch.manual_seed(1)
    args, kwargs = sample(op)
    outs = [torch.empty_like(w) for w in expected(op, args, kwargs)]
    run_recipe(op, outs, args, kwargs)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        run_recipe(op, outs, args, kwargs)
    taken = sum(e.nbytes() for e in run.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0)
    assert taken <= 64, f"{op} allocates {taken} bytes"  # a wrapped number is a scalar tensor of 8 bytes


@pytest.mark.parametrize("op", [op for op in ATEN if OPERATORS[op].unread])
def test_unread_arguments_may_hold_anything(op):
    torch.manual_seed(1)
    args, kwargs = sample(op)
    wanted = expected(op, args, kwargs)
    spoiled = [torch.full_like(a, float("nan")) if k in OPERATORS[op].unread else a for k, a in enumerate(args)]
    outs = [torch.empty_like(w) for w in wanted]
    run_recipe(op, outs, spoiled, kwargs)
    assert all(same(got, want) for got, want in zip(outs, wanted))
