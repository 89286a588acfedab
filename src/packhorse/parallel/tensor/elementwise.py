"""Operators that work element by element, on the tp ranks. No torch.

Every rank does its part. What is whole is narrowed to that part; sums over ranks stay sums where the operator is linear.
"""

from math import prod

from packhorse.graph.ir import Arg, Ref, Value
from packhorse.parallel.split import Split
from packhorse.parallel.tensor.placed import WHOLE, Place, Sum, Whole
from packhorse.parallel.tensor.spread import Spread

_NAMES = """
abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor log log10 log1p log2 neg reciprocal round rsqrt sgn sigmoid sign sin
sinh sqrt tan tanh trunc gelu silu mish hardsigmoid hardswish relu hardtanh leaky_relu elu softplus clamp clamp_min clamp_max clone lift_fresh_copy
_to_copy logical_and logical_or logical_xor logical_not bitwise_not maximum minimum atan2 addcmul addcdiv gelu_backward tanh_backward sigmoid_backward
silu_backward threshold_backward leaky_relu_backward hardtanh_backward softplus_backward hardsigmoid_backward elu_backward
mish_backward hardswish_backward native_dropout native_dropout_backward copy zeros_like ones_like full_like empty_like rand_like randn_like isnan
isinf nan_to_num fill log_sigmoid_forward
""".split()
_KINDS = """
add.Tensor sub.Tensor mul.Tensor div.Tensor fmod.Tensor remainder.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar fmod.Scalar remainder.Scalar
rsub.Scalar eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar where.self
masked_fill.Scalar masked_fill.Tensor fill.Scalar bernoulli.p clamp.Tensor div.Tensor_mode div.Scalar_mode
""".split()
ELEMENTWISE = {f"aten.{name}.default" for name in _NAMES} | {f"aten.{name}" for name in _KINDS}

_ADD = {"aten.add.Tensor", "aten.sub.Tensor"}
_KEEP = {"aten.neg.default", "aten.clone.default", "aten.mul.Scalar", "aten.div.Scalar"}  # linear in their first argument, the others are numbers
_TIMES = {"aten.mul.Tensor", "aten.div.Tensor"}


def elementwise(spread: Spread) -> None:
    """Any operator of ELEMENTWISE."""
    node = spread.node
    if _stays_a_sum(spread) or _is_owed(spread):
        return
    names = [name for name in dict.fromkeys(node.arg_names())]
    result = next(value for value in node.outputs if value is not None)
    target = _target(spread, names, result)
    if target is None:
        spread.again({name: spread.local[name] for name in names})
        return
    refs: dict[str, Ref] = {}
    for name in names:
        refs[name] = spread.ref(name, place_of_argument(spread.full[name], target, result))
    args = tuple(_with(arg, refs) for arg in node.args)
    kwargs = tuple((key, _with(arg, refs)) for key, arg in node.kwargs)
    spread.emit(node.op, args, [(value, target) for value in node.outputs], kwargs)


def _target(spread: Spread, names: list[str], result: Value) -> Split | None:
    """Where the result is: where its largest split argument is; None: whole."""
    found: list[tuple[int, Split]] = []
    for name in names:
        place = spread.place[name]
        if isinstance(place, Split):
            found.append((prod(spread.full[name].shape), lifted(place, spread.full[name], result)))
    if not found:  # only now: a sum that meets a split value goes to where that one is
        for name in names:
            if isinstance(place := spread.settled(name), Split):
                found.append((prod(spread.full[name].shape), lifted(place, spread.full[name], result)))
    return max(found, key=lambda item: item[0])[1] if found else None


def lifted(split: Split, value: Value, result: Value) -> Split:
    """A split of an argument as one of the result, which may have more dims in front."""
    return Split(split.dim + len(result.shape) - len(value.shape), split.blocks, split.padding)


def place_of_argument(value: Value, target: Split, result: Value) -> Place:
    """Where an argument has to be for the result to be there: along with it, or whole where it is broadcast along that dim."""
    dim = target.dim - len(result.shape) + len(value.shape)
    if dim < 0 or (value.shape[dim] == 1 and result.shape[target.dim] != 1):
        return WHOLE
    return Split(dim, target.blocks, target.padding)


def _stays_a_sum(spread: Spread) -> bool:
    """The operator is linear in sums over ranks: its result is one, and is added up later, once for all."""
    node = spread.node
    refs = [arg.name for arg in node.args if isinstance(arg, Ref)]
    places = [spread.place[name] for name in refs]
    sums = [place for place in places if isinstance(place, Sum)]
    if not sums:
        return False
    lazy = all(place.lazy for place in sums)
    keeps = node.op in _ADD and len(sums) == len(refs) == 2 and not node.kwargs
    keeps = keeps or (len(refs) == 1 and node.op in (_KEEP | _TIMES))
    keeps = keeps or (lazy and len(sums) == 1 and isinstance(places[0], Sum) and node.op in _TIMES and isinstance(places[-1], Whole))
    keeps = keeps or (lazy and len(sums) == 1 and isinstance(places[-1], Sum) and node.op == "aten.mul.Tensor" and isinstance(places[0], Whole))
    if keeps and node.op == "aten.clone.default" and not node.mark and spread.is_laid_out_as(refs[0], node.outputs[0]):
        spread.same(node.outputs[0], refs[0])
    elif keeps:
        spread.emit(
            node.op, tuple(_with(arg, {n: Ref(spread.local[n].name) for n in refs}) for arg in node.args), [(node.outputs[0], Sum(lazy))], node.kwargs
        )
    return keeps


def _is_owed(spread: Spread) -> bool:
    """In the backward pass, where gradients of one value follow one another: a sum over ranks that is added to something else waits for the next."""
    node = spread.node
    refs = [arg.name for arg in node.args if isinstance(arg, Ref)]
    result = node.outputs[0]
    if node.op != "aten.add.Tensor" or len(refs) != 2 or node.kwargs or node.phase != "backward" or result is None:
        return False
    if any(spread.full[name].shape != result.shape for name in refs):
        return False
    sums = [name for name in refs if isinstance(spread.place[name], Sum)]
    if len(sums) != 1:
        return False
    spread.owe(result, next(name for name in refs if name not in sums), sums[0])
    return True


def _with(arg: Arg, refs: dict[str, Ref]) -> Arg:
    if isinstance(arg, Ref):
        return refs[arg.name]
    if isinstance(arg, tuple):
        return tuple(_with(item, refs) for item in arg)
    return arg
