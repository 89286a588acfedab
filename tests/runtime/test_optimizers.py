"""The optimizer kernel by itself: chunks, threads, gradients of another dtype."""

import copy

import pytest
import torch

import packhorse as ph
from packhorse.graph.ir import Node, Ref, Value
from packhorse.graph.operators import operator, update_batches
from packhorse.optim import OPTIMIZERS
from packhorse.runtime.optimizers import LiveGroup, optimize

pytestmark = pytest.mark.cpu


def test_batches_cover_every_element_once():
    pieces = ((0, 3, 0), (16, 0, 1), (16, 300_000, 2), (300_032, 5, 3), (300_048, 7, 4))
    for fused in (True, False):
        for temporaries in (0, 1):
            batches = update_batches(pieces, fused, temporaries, 4)
            seen = [(index, element) for batch in batches for index, start, end in batch for element in range(start, end)]
            assert seen == [(index, element) for start, count, index in pieces for element in range(start, start + count)]
            if fused and temporaries:
                assert max(batch[-1][2] - batch[0][1] for batch in batches) * 4 == 1 << 19
    assert len(update_batches(pieces, True, 0, 4)) == 1


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {"fused": True, "weight_decay": 0.1}),
        (torch.optim.Rprop, {}),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    ],
)
def test_parameters_larger_than_a_chunk(kind, options, threads):
    """170,017 elements: more than a chunk of 131,072, and enough that torch splits the work between threads."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plain = torch.nn.Linear(409, 415)
    mine = copy.deepcopy(plain)
    theirs, ours = kind(plain.parameters(), lr=1e-2, **options), kind(mine.parameters(), lr=1e-2, **options)
    x = torch.randn(3, 409)
    step = ph.compile(mine, ph.plan(mine, x, optimizer=ours, clip_norm=0.1, loss=lambda out, _: out.square().mean()))
    for _ in range(3):
        theirs.zero_grad()
        plain(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
        step(x)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), mine.parameters()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS, key=lambda c: c.__name__))
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_in_fewer_bits_than_the_parameters(kind, fused, scaled, dtype):
    """Converted to the parameter's dtype, then scaled there, then as torch.optim with that gradient; the gradient itself stays."""
    described = OPTIMIZERS[kind]
    if fused and described.fused is None:
        return
    torch.manual_seed(0)
    pieces = ((0, 37, 0), (48, 5, 1))
    flat, grads = torch.randn(64), torch.randn(64).to(dtype)
    coefficient = torch.tensor(0.37) if scaled else None
    parameters = [torch.nn.Parameter(flat[start : start + count].clone()) for start, count, _ in pieces]
    theirs = kind(parameters, lr=1e-2, **({"fused": True} if fused else {}))
    for parameter, (start, count, _) in zip(parameters, pieces):
        parameter.grad = grads[start : start + count].float() * (0.37 if scaled else 1.0)
    theirs.step()

    group = kind(parameters, lr=1e-2, **({"fused": True} if fused else {})).param_groups[0]
    needs = described.needs_of(group)
    kept = [torch.full_like(flat, value) for value in needs.states.values()]
    kept += [torch.full((2,), needs.numbers.get(name, 0.0)) for name in needs.kept_numbers]
    options = {"fused": fused, "states": list(needs.states), "numbers": list(needs.kept_numbers), "pieces": pieces, "own_grad": True}
    options["temporaries"] = needs.temporaries + 1
    node = Node("packhorse.optimize.1", (Ref("param"),), tuple(options.items()), ())
    scratch = torch.empty(operator(node.op).scratch(node, {"param": Value("param", "f32", (64,), (1,))}), dtype=torch.uint8)
    before = grads.clone()
    optimize([], scratch, flat, *kept, grads, coefficient, hyper=LiveGroup(theirs, described, 0), **options)
    for parameter, (start, count, _) in zip(parameters, pieces):
        assert torch.equal(flat[start : start + count], parameter)
    assert torch.equal(grads, before)
