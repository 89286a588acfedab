"""Operators on parts of a vocabulary: put together over all parts, what plain PyTorch makes of the whole one."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import packhorse.graph.operators as operators
from packhorse.capture.dtypes import SHORT
from packhorse.graph.ir import Node, Ref, Value
from packhorse.graph.operators import operator
from packhorse.graph.text import parse_graph
from packhorse.graph.verify import verify
from packhorse.planning.persistent import Persistent, make_run
from packhorse.planning.plan import Options, plan_graph
from packhorse.program.check import check_program
from packhorse.program.lower import lower
from packhorse.runtime.arena import Arena
from packhorse.runtime.executor import BoundProgram
from packhorse.runtime.kernels import RECIPES
from packhorse.runtime.reference import run_graph
from packhorse.runtime.storage import allocate, views
from packhorse.units import align_up

pytestmark = pytest.mark.cpu
VOCAB, WIDTH, TOKENS = 13, 6, 40
# degree -> rows of each part: 1 to 7 rows of padding, and over 4 ranks one that has nothing else
PARTS = {2: 7, 3: 6, 4: 5}
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(operators, "LOSS_CHUNK_BYTES", 300)


def scratch_of(op: str, args: tuple) -> Tensor:
    """Just the bytes that the operator's row asks for, in the arena's pattern."""
    values = {f"v{k}": Value(f"v{k}", SHORT[a.dtype], tuple(a.shape), a.stride()) for k, a in enumerate(args) if isinstance(a, Tensor)}
    node = Node(op, tuple(Ref(f"v{k}") if isinstance(a, Tensor) else a for k, a in enumerate(args)), (), ())
    need = operator(op).scratch
    return torch.full((need(node, values) if need else 0,), 0xA5, dtype=torch.uint8)


def run(name: str, outs: list[Tensor], *args) -> list[Tensor]:
    """The recipe on results full of NaN; it has to touch the last byte of its scratch, which the arena's canary looks at."""
    op = f"packhorse.{name}.default"
    scratch = scratch_of(op, args)
    RECIPES[op](outs, scratch if len(scratch) else None, *args)
    assert not len(scratch) or scratch[-1] != 0xA5
    return outs


def nan(*shape: int, like: Tensor) -> Tensor:
    return like.new_full(shape, math.nan)


def parts(degree: int) -> list[tuple[int, int]]:
    """(start, rows in the vocabulary) of each rank."""
    size = PARTS[degree]
    return [(r * size, max(0, min(VOCAB, (r + 1) * size) - r * size)) for r in range(degree)]


def padded(whole: Tensor, dim: int, degree: int, value: float = 77.0) -> list[Tensor]:
    """The parts of a tensor, with rubbish in the padding."""
    room = [0, 0] * (whole.dim() - 1 - dim) + [0, degree * PARTS[degree] - VOCAB]
    return list(F.pad(whole, room, value=value).split(PARTS[degree], dim))


# -- the embedding -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degree", PARTS)
def test_embedding(degree, dtype):
    torch.manual_seed(0)
    whole, ids = torch.randn(VOCAB, WIDTH).to(dtype), torch.randint(0, VOCAB, (4, 11), dtype=torch.int64)[:, 1:]
    found = []
    for (start, _), weight in zip(parts(degree), padded(whole, 0, degree)):
        found += run("part_embedding", [nan(4, 10, WIDTH, like=whole)], weight, ids, start)
    assert torch.equal(sum(found), F.embedding(ids, whole))


@pytest.mark.parametrize("padding_idx", [-1, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("degree", PARTS)
def test_gradient_of_the_embedding(degree, dtype, padding_idx):
    torch.manual_seed(0)
    grad, ids = torch.randn(TOKENS, WIDTH).to(dtype), torch.randint(0, VOCAB, (TOKENS,))
    total = torch.randn(VOCAB, WIDTH).to(dtype)
    weight = torch.zeros(VOCAB, WIDTH, dtype=dtype, requires_grad=True)
    F.embedding(ids, weight, None if padding_idx < 0 else padding_idx).backward(grad)
    found, added, in_place = [], [], []
    for (start, _), before in zip(parts(degree), padded(total, 0, degree)):
        rest = (grad, ids, PARTS[degree], padding_idx, start)
        found += run("part_embedding_backward", [nan(PARTS[degree], WIDTH, like=grad)], *rest)
        added += run("add_part_embedding_backward", [nan(PARTS[degree], WIDTH, like=grad)], before, *rest)
        in_place += run("add_part_embedding_backward", [before.clone()], before, *rest)
        own = before.clone()
        assert torch.equal(run("add_part_embedding_backward", [own], own, *rest)[0], added[-1])
    assert torch.equal(torch.cat(found)[:VOCAB], weight.grad), "sums are in the order of the tokens: the same bits"
    assert not torch.cat(found)[VOCAB:].any()
    assert torch.equal(torch.cat(added)[:VOCAB], total + weight.grad)


def test_an_index_outside_of_the_vocabulary_is_refused_where_its_size_is_given():
    weight, bad = torch.randn(7, WIDTH), torch.tensor([0, VOCAB])
    run("part_embedding", [nan(2, WIDTH, like=weight)], weight, bad, 0)
    with pytest.raises(IndexError, match="13"):
        run("part_embedding", [nan(2, WIDTH, like=weight)], weight, bad, 7, VOCAB)
    with pytest.raises(IndexError, match="-1"):
        run("part_embedding", [nan(2, WIDTH, like=weight)], weight, torch.tensor([-1, 0]), 0, VOCAB)
    stats = [torch.empty(()), torch.empty(())], torch.zeros(2), torch.zeros(2)
    run("vocab_nll", *stats, torch.tensor([0, -100]), None, 1, -100, VOCAB)
    with pytest.raises(IndexError, match="13"):
        run("vocab_nll", *stats, bad, None, 1, -100, VOCAB)


# -- the loss ----------------------------------------------------------------------------------------------------------------------------


def loss_of_parts(logits, target, weight, reduction, ignore_index, degree, grad_output, in_place):
    """(loss, total weight, gradient of the whole logits) as `degree` ranks compute them."""
    rows = len(target)
    local = padded(logits, 1, degree)
    stats = []
    for x, (start, valid) in zip(local, parts(degree)):
        stats += run("vocab_stats", [nan(3, rows, like=x)], x, target, start, valid)
        without = run("vocab_stats", [nan(3, rows, like=x)], x, None, start, valid)[0]
        assert torch.allclose(without[:2], stats[-1][:2], 0, 0, equal_nan=True) and not without[2].any()
    lse, picked = run("vocab_merge", [nan(rows, like=logits), nan(rows, like=logits)], torch.stack(stats))
    shape = (rows,) if reduction == 0 else ()
    loss, total = run("vocab_nll", [nan(*shape, like=lse), nan(like=lse)], lse, picked, target, weight, reduction, ignore_index)
    grads = []
    for x, (start, valid) in zip(local, parts(degree)):
        (log_probs,) = run("vocab_log_probs", [x if in_place else nan(*x.shape, like=x)], x, lse, valid)
        out = log_probs if in_place else nan(*x.shape, like=x)
        grads += run("vocab_nll_backward", [out], grad_output, log_probs, target, weight, reduction, ignore_index, total, start)
    whole = torch.cat(grads, 1)
    assert not whole[:, VOCAB:].any(), "padding has no gradient"
    return loss, total, whole[:, :VOCAB]


def plain_loss(logits, target, weight, reduction, ignore_index, grad_output):
    x = logits.clone().requires_grad_()
    loss, total = aten.nll_loss_forward(F.log_softmax(x, 1), target, weight, reduction, ignore_index)
    loss.backward(grad_output)
    return loss.detach(), total, x.grad


BOUNDS = {torch.float64: 2e-15, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("ignore_index", [-100, 0, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("degree", PARTS)
def test_loss_and_its_gradient(degree, reduction, weighted, ignore_index, dtype):
    torch.manual_seed(1)
    logits, target = torch.randn(TOKENS, VOCAB, dtype=dtype) * 3, torch.randint(0, VOCAB, (TOKENS,))
    target[5] = ignore_index
    weight = torch.rand(VOCAB, dtype=dtype) + 0.5 if weighted else None
    grad_output = torch.rand(() if reduction else (TOKENS,), dtype=dtype) + 0.5
    wanted = plain_loss(logits, target, weight, reduction, ignore_index, grad_output)
    for in_place in (False, True):
        found = loss_of_parts(logits, target, weight, reduction, ignore_index, degree, grad_output, in_place)
        for ours, theirs in zip(found, wanted):
            assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
            assert (ours - theirs).abs().max() <= BOUNDS[dtype] * (1 + theirs.abs().max())


def test_half_precision_keeps_what_its_digits_allow():
    torch.manual_seed(1)
    logits, target = torch.randn(TOKENS, VOCAB, dtype=torch.bfloat16), torch.randint(0, VOCAB, (TOKENS,))
    one = torch.tensor(1.0)
    loss, _, grad = loss_of_parts(logits, target, None, 1, -100, 3, one.bfloat16(), False)
    exact_loss, _, exact = plain_loss(logits.double(), target, None, 1, -100, one.double())
    assert (loss - exact_loss).abs() <= 2.0**-7 * exact_loss and (grad - exact).abs().max() <= 2.0**-7 * exact.abs().max()


@pytest.mark.parametrize("degree", PARTS)
def test_extreme_logits(degree):
    """Rows of one rank that are -infinity throughout, numbers whose exponentials overflow, and rows that log-softmax makes NaN of."""
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64)
    logits[:9, : PARTS[degree]] = -math.inf
    logits[9:20] *= 1e4
    target, one = torch.full((TOKENS,), VOCAB - 1), torch.ones(TOKENS, dtype=torch.float64)
    for in_place in (False, True):
        loss, _, grad = loss_of_parts(logits, target, None, 0, -100, degree, one, in_place)
        wanted, _, wanted_grad = plain_loss(logits, target, None, 0, -100, one)
        assert torch.isfinite(grad).all() and torch.allclose(loss, wanted, rtol=1e-15, atol=1e-15)
        assert torch.allclose(grad, wanted_grad, rtol=0, atol=1e-12)
    logits[3], logits[4, 2], logits[5, 1] = -math.inf, math.nan, math.inf
    loss, _, _ = loss_of_parts(logits, target, None, 0, -100, degree, one, False)
    assert torch.equal(loss.isnan(), plain_loss(logits, target, None, 0, -100, one)[0].isnan()) and loss.isnan().sum() == 3


def test_when_every_target_is_ignored():
    logits, target = torch.randn(4, VOCAB), torch.full((4,), -100)
    loss, total, grad = loss_of_parts(logits, target, None, 1, -100, 2, torch.tensor(1.0), False)
    assert loss.isnan() and total == 0 and not grad.any()
    loss, total, grad = loss_of_parts(logits, target, None, 2, -100, 2, torch.tensor(1.0), False)
    assert loss == 0 and not grad.any()


def test_no_rows():
    logits, target = torch.randn(0, VOCAB), torch.zeros(0, dtype=torch.int64)
    loss, _, grad = loss_of_parts(logits, target, None, 2, -100, 2, torch.tensor(1.0), False)
    assert loss == 0 and grad.shape == (0, VOCAB)
    run("part_embedding", [nan(0, WIDTH, like=logits)], torch.randn(7, WIDTH), target, 0)
    (rows,) = run("part_embedding_backward", [nan(7, WIDTH, like=logits)], torch.randn(0, WIDTH), target, 7, -1, 0)
    assert not rows.any()


# -- memory ------------------------------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 64, 4096


def big_calls():
    """name -> (results, arguments): logits and weights of 1 MiB."""
    x, target = torch.randn(ROWS, COLUMNS), torch.randint(0, 2 * COLUMNS, (ROWS,))
    target[3] = -100
    stats, lse = torch.randn(4, 3, ROWS), torch.full((ROWS,), 9.0)
    weight, one = torch.rand(2 * COLUMNS), torch.tensor(1.0)
    table, grad, ids = torch.randn(COLUMNS, ROWS), torch.randn(COLUMNS, ROWS), torch.randint(0, 2 * COLUMNS, (COLUMNS,))
    return {
        "part_embedding": ([torch.empty_like(table)], (table, ids, COLUMNS, 2 * COLUMNS)),
        "part_embedding_backward": ([torch.empty_like(table)], (grad, ids, COLUMNS, -1, COLUMNS)),
        "add_part_embedding_backward": ([table], (table, grad, ids, COLUMNS, -1, COLUMNS)),
        "vocab_stats": ([torch.empty(3, ROWS)], (x, target, COLUMNS, COLUMNS - 100)),
        "vocab_merge": ([torch.empty(ROWS), torch.empty(ROWS)], (stats,)),
        "vocab_log_probs": ([x], (x, lse, COLUMNS - 100)),
        "vocab_nll": ([torch.empty(()), torch.empty(())], (lse, lse, target, weight, 1, -100, 2 * COLUMNS)),
        "vocab_nll_backward": ([x], (one, x, target, weight, 1, -100, one, COLUMNS)),
    }


@pytest.mark.parametrize("name", sorted(big_calls()))
def test_nothing_of_the_vocabularys_size_is_allocated(name, monkeypatch):
    monkeypatch.undo()  # chunks of their real size
    outs, args = big_calls()[name]
    op = f"packhorse.{name}.default"
    scratch = scratch_of(op, args)
    touched = operators.loss_rows(COLUMNS, 4 * ROWS) + COLUMNS  # rows that an embedding's gradient brings together, and sums up
    assert len(scratch) <= (4 * touched * ROWS if "add" in name else operators.LOSS_CHUNK_BYTES * 1.01)
    RECIPES[op](outs, scratch, *args)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        RECIPES[op](outs, scratch, *args)
    taken = [e.nbytes() for e in made.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0]
    if operator(op).kind == "out":
        assert max(taken, default=0) <= 8, f"{taken} bytes"  # a wrapped number, or a tensor of one
    else:
        assert max(taken) <= 8 * COLUMNS, f"{taken} bytes: more than a number a token"


# -- in a program ------------------------------------------------------------------------------------------------------------------------

TIED = """graph g
input %w: f64[16, 6] = param "w"
input %ids: i64[4, 10] = batch "ids"
input %labels: i64[40] = batch "labels"
%h: f64[4, 10, 6] = packhorse.part_embedding.default(%w, %ids, 0, 13)  # forward
%rows: f64[40, 6] @h+0 = packhorse.views.default(%h)  # forward
%t: f64[6, 16]{1, 6} @w+0 = packhorse.views.default(%w)  # forward
%x: f64[40, 16] = aten.mm.default(%rows, %t)  # forward
%own: f64[3, 40] = packhorse.vocab_stats.default(%x, %labels, 0, 13)  # forward
%stats: f64[1, 3, 40] @own+0 = packhorse.views.default(%own)  # forward
%lse: f64[40], %picked: f64[40] = packhorse.vocab_merge.default(%stats)  # forward
%lp: f64[40, 16] = packhorse.vocab_log_probs.default(%x, %lse, 13)  # forward
%loss: f64[], %total: f64[] = packhorse.vocab_nll.default(%lse, %picked, %labels, None, 1, -100, 13)  # forward
%one: f64[] = aten.ones_like.default(%loss)  # backward
%gx: f64[40, 16] = packhorse.vocab_nll_backward.default(%one, %lp, %labels, None, 1, -100, %total, 0)  # backward
%gt: f64[16, 40]{1, 16} @gx+0 = packhorse.views.default(%gx)  # backward
%gw: f64[16, 6] = aten.mm.default(%gt, %rows)  # backward
%gr: f64[40, 6] = aten.mm.default(%gx, %w)  # backward
%gh: f64[4, 10, 6] @gr+0 = packhorse.views.default(%gr)  # backward
%g: f64[16, 6] = packhorse.add_part_embedding_backward.default(%gw, %gh, %ids, 16, -1, 0)  # backward
output %g = grad "w"
output %loss = metric "loss"
"""


def test_a_program_with_a_tied_embedding():
    """Of one rank that has the whole vocabulary: the log-probabilities and their gradient take the place of the logits, bytes are as planned, and the
    oracle has the same bits."""
    graph = parse_graph(TIED)
    verify(graph)
    runs = [("p", "parameters", "param", "w", "w"), ("g", "gradients", "grad", "w", "g"), ("m", "metrics", "metric", "loss", "loss")]
    persistent = Persistent(tuple(make_run(run, kind, role, [(target, graph.values[name])]) for run, kind, role, target, name in runs))
    plan = plan_graph(graph, persistent, Options())
    program = lower(plan)
    check_program(program, {run.name: run.num_bytes for run in persistent.runs})
    assert {plan.placement.homes[name] for name in ("lp", "gx")} == {plan.placement.homes["x"]}
    torch.manual_seed(0)
    given = {"w": torch.randn(16, 6, dtype=torch.float64), "ids": torch.randint(0, VOCAB, (4, 10)), "labels": torch.randint(0, VOCAB, (40,))}
    memory = allocate(persistent, torch.device("cpu"))
    views(persistent, memory, "param")["w"].copy_(given["w"])
    arena = Arena(plan.arena_bytes, torch.device("cpu"), plan.placement.hollow_bytes)
    measured = BoundProgram(program, arena, memory, []).run({name: given[name] for name in ("ids", "labels")})
    assert measured.arena_bytes == align_up(plan.arena_bytes, 64)
    found = {key: views(persistent, memory, key[0])[key[1]] for key in (("grad", "w"), ("metric", "loss"))}
    oracle = run_graph(graph, given)
    assert all(torch.equal(found[key], oracle[key]) for key in found)

    weight = given["w"][:VOCAB].clone().requires_grad_()
    loss = F.cross_entropy((F.embedding(given["ids"], weight) @ weight.t()).view(-1, VOCAB), given["labels"])
    loss.backward()
    assert abs(found["metric", "loss"] - loss) <= 1e-14 and (found["grad", "w"][:VOCAB] - weight.grad).abs().max() <= 1e-14
    assert not found["grad", "w"][VOCAB:].any()
