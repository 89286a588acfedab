"""What the planner knows of each operator, as one table; no torch. One row per operator.

kind       how its kernel delivers results (the recipes themselves are in runtime/kernels.py):
           "out"     it writes straight into planned memory and allocates nothing
           "copy"    the same, but its kernel allocates workspace on the way
           "adopt"   the kernel allocates; the result is external (outside the arena) for its whole life. Every operator without a row.
in_place   positions of arguments whose storage the first result may take over, when they have its shape, strides and dtype and die here
unread     positions of arguments of which the kernel reads only the shape, never the contents: they keep nothing alive
updates    (result, argument) pairs that must share storage: the kernel changes persistent memory in place
on_host    results and scratch lie in the host's memory, and the host computes them

Gradient operators keep alive only what they read (Chen et al. 2016, section 3): `unread` is where PyTorch's own formulas
hold a tensor for its shape alone. The bytes each operator saves are listed in graph/saved.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from packhorse.graph.dtypes import ITEMSIZE
from packhorse.graph.ir import Node
from packhorse.parallel.pieces import bucket_bytes


@dataclass(frozen=True, slots=True)
class Operator:
    kind: str
    in_place: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    updates: tuple[tuple[int, int], ...] = ()
    scratch: Callable[[Node, "dict"], int] | None = None  # (node, values) -> bytes of scratch in the arena
    on_host: bool = False


ADOPT = Operator("adopt")

# Chunk of rows that losses and embeddings work through; of elements that an optimizer works through. Both fit a core's cache (C_B of ZeRO-R).
LOSS_CHUNK_BYTES = 1 << 19
UPDATE_CHUNK_BYTES = 1 << 19
MAX_STATES = 12  # state runs that an optimizer may have; torch's own have four at most

# Collectives over an axis of the mesh (packhorse/parallel): each starts it, and WAIT ends it.
ALL_GATHER = "packhorse.all_gather.default"  # this rank's shard -> all shards
ALL_GATHER_OTHERS = "packhorse.all_gather_others.default"  # this rank's shard -> those before it, those after it
REDUCE_SCATTER = "packhorse.reduce_scatter.default"  # tensors -> the sums over ranks of the pieces that lie in this rank's shard
REDUCE_SCATTER_OWN = "packhorse.reduce_scatter_own."  # the same, in place in the tensors; the number of tensors follows
ALL_REDUCE = "packhorse.all_reduce."  # the sums over ranks, in place in the tensors; the number of tensors follows
WAIT = "packhorse.wait.default"
VIEWS = "packhorse.views.default"  # views of a root, wherever they lie in it
MAX_REDUCED = 64  # tensors in one reduction

# Collectives over the axis `tp`, each one node that starts it and waits for its end.
TENSOR_SUM = "packhorse.tensor_sum.default"  # a tensor -> its sum over ranks
TENSOR_GATHER = "packhorse.tensor_gather.default"  # this rank's tensor -> the tensors of all ranks, flat, in the order of the ranks
TENSOR_SCATTER = "packhorse.tensor_scatter.default"  # a tensor of one part for each rank -> this rank's part of its sum over ranks

# Saved values that wait elsewhere (packhorse/residency). The copies are started here, and WAIT ends them.
OWN_SLICE = "packhorse.own_slice.default"  # a flat tensor -> this rank's slice of it, the last ones with padding
TO_HOST = "packhorse.to_host.default"  # a tensor -> the same in host memory
FROM_HOST = "packhorse.from_host.default"  # and back
# The update, where optimizer states are on the host: operator -> the same, computed there.
HOST_CONVERT, HOST_FOLLOW, HOST_OPTIMIZE = "packhorse.host_convert.default", "packhorse.host_follow.default", "packhorse.host_optimize."


def loss_rows(num_rows: int, row_bytes: int) -> int:
    """Rows per chunk of what losses and embeddings work through."""
    return max(1, min(num_rows, LOSS_CHUNK_BYTES // max(row_bytes, 1)))


def _loss_scratch(node: Node, values: dict) -> int:
    log_probs = values[node.args[1].name]  # type: ignore[union-attr]
    rows, columns = log_probs.shape
    row_bytes = columns * log_probs.extent_bytes // max(log_probs.num_elements, 1)
    return loss_rows(rows, row_bytes) * row_bytes


def update_batches(pieces: tuple[tuple[int, int, int], ...], fused: bool, temporaries: int, itemsize: int) -> list[list[tuple[int, int, int]]]:
    """What an optimizer takes at once: (parameter, start, end), element ranges of a run. pieces: (start, count, parameter).

    A fused kernel that needs no temporary takes everything at once. Fused kernels split their work at cache lines, so a large parameter
    may be cut into chunks and small neighbours taken together. The
    unfused formulas round an element by where it stands in its vector loop, so each parameter is taken alone and whole, as torch.optim does.
    """
    if not fused:
        return [[(index, start, start + count)] for start, count, index in pieces if count]
    if temporaries == 0:
        return [[(index, start, start + count) for start, count, index in pieces]] if pieces else []
    limit = UPDATE_CHUNK_BYTES // itemsize
    found: list[list[tuple[int, int, int]]] = []
    for first, count, index in pieces:
        for start in range(first, first + count, limit):
            end = min(start + limit, first + count)
            if found and end - found[-1][0][1] <= limit:
                found[-1].append((index, start, end))
            else:
                found.append([(index, start, end)])
    return found


def _update_scratch(node: Node, values: dict) -> int:
    """`temporaries` times the longest batch."""
    options: dict[str, Any] = dict(node.kwargs)
    param = values[node.args[0].name]  # type: ignore[union-attr]
    itemsize = param.extent_bytes // max(param.num_elements, 1)
    longest = max(
        (batch[-1][2] - batch[0][1] for batch in update_batches(options["pieces"], options["fused"], options["temporaries"], itemsize)), default=0
    )
    return options["temporaries"] * -(-longest * itemsize // 64) * 64


def _norm_scratch(node: Node, values: dict) -> int:
    """One norm per gradient or piece of one, 8 bytes each at most, and the widest that has to be converted."""
    options: dict[str, Any] = dict(node.kwargs)
    given = [values[ref.name] for ref in node.args[0]]  # type: ignore[union-attr]
    sizes = [[count for _, count, _ in some] for some in options["pieces"]] if "pieces" in options else [[value.num_elements] for value in given]
    widened = [max(some, default=0) * ITEMSIZE[dtype] for some, value, dtype in zip(sizes, given, options["dtypes"]) if value.dtype != dtype]
    return 64 * -(-8 * sum(map(len, sizes)) // 64) + max(widened, default=0)


def _rows_scratch(node: Node, values: dict) -> int:
    """The rows of an embedding that a batch touches, summed up: no more than it has tokens."""
    grad = values[node.args[1].name]  # type: ignore[union-attr]
    width = grad.shape[-1]
    return min(grad.num_elements // max(width, 1), int(node.args[3])) * width * ITEMSIZE[grad.dtype]  # type: ignore[arg-type]


def _safe_softmax_scratch(node: Node, values: dict) -> int:
    """The largest number of each row, and whether it is -infinity."""
    x, out = values[node.args[0].name], node.outputs[0]  # type: ignore[union-attr]
    rows = x.num_elements // max(x.shape[node.args[1]] if x.shape else 1, 1)  # type: ignore[index]
    assert out is not None
    return rows * (ITEMSIZE[x.dtype] + 1)


def _follow_scratch(node: Node, values: dict) -> int:
    """A chunk in each of the two dtypes, and its truth values."""
    master, copy = (values[arg.name] for arg in node.args)  # type: ignore[union-attr]
    return follow_elements(master.num_elements) * (ITEMSIZE[master.dtype] + ITEMSIZE[copy.dtype] + 1)


def follow_elements(num_elements: int) -> int:
    """Elements of master weights that are compared with their copies at once."""
    return min(num_elements, UPDATE_CHUNK_BYTES // 8)


def tensor_shard(op: str, num_elements: int, ranks: int) -> int:
    """Elements that each rank sums up in TENSOR_SUM (the last ones fewer) and TENSOR_SCATTER, of tensors of `num_elements`."""
    return -(-num_elements // ranks) if op == TENSOR_SUM else num_elements // ranks


def _tensor_bucket(node: Node, values: dict) -> int:
    """What is sent and received at once."""
    x, ranks = values[node.args[0].name], dict(node.kwargs)["ranks"]  # type: ignore[union-attr]
    shard = tensor_shard(node.op, x.num_elements, ranks)  # type: ignore[arg-type]
    return bucket_bytes((0,), (x.num_elements,), shard, ranks, ITEMSIZE[x.dtype])  # type: ignore[arg-type]


def _part_embedding_scratch(node: Node, values: dict) -> int:
    """For each index its row here, and whether it is elsewhere."""
    return values[node.args[1].name].num_elements * 9  # type: ignore[union-attr]


def _part_rows_scratch(node: Node, values: dict) -> int:
    """A chunk of the gradient's rows."""
    grad = values[node.args[-5].name]  # type: ignore[union-attr]
    row_bytes = grad.shape[-1] * ITEMSIZE[grad.dtype]
    return loss_rows(grad.num_elements // max(grad.shape[-1], 1), row_bytes) * row_bytes if grad.num_elements else 0


def _add_part_rows_scratch(node: Node, values: dict) -> int:
    """The rows that a batch touches, summed up, and a chunk."""
    return _rows_scratch(node, values) + _part_rows_scratch(node, values)


def _vocab_stats_scratch(node: Node, values: dict) -> int:
    """A chunk of rows; for each of them where its target is, and a truth value. Padding counts, so that all ranks need the same and plan alike."""
    x = values[node.args[0].name]  # type: ignore[union-attr]
    row_bytes = x.shape[1] * ITEMSIZE[x.dtype]
    return loss_rows(x.shape[0], row_bytes) * (row_bytes + 9) if x.num_elements else 0


def _vocab_merge_scratch(node: Node, values: dict) -> int:
    """A number for each rank and row."""
    stats = values[node.args[0].name]  # type: ignore[union-attr]
    return stats.num_elements // 3 * ITEMSIZE[stats.dtype]


def _vocab_loss_scratch(node: Node, values: dict) -> int:
    """For each row a label, two numbers and a truth value."""
    target, first = values[node.args[2].name], values[node.args[1].name]  # type: ignore[union-attr]
    return target.num_elements * (9 + 2 * ITEMSIZE[first.dtype])


_UNARY = (
    "abs acos acosh asin asinh atan atanh ceil cos cosh erf erfc exp exp2 expm1 floor log log10 log1p log2 neg "
    "reciprocal round rsqrt sgn sigmoid sign sin sinh sqrt tan tanh trunc gelu silu mish hardsigmoid hardswish relu "
    "hardtanh leaky_relu elu softplus clamp clamp_min clamp_max"
).split()
_BINARY = "add sub mul div fmod remainder"

OPERATORS: dict[str, Operator] = {
    **{f"aten.{name}.default": Operator("out", in_place=(0,)) for name in _UNARY},
    **{f"aten.{name}.Tensor": Operator("out", in_place=(0, 1)) for name in _BINARY.split()},
    **{f"aten.{name}.Scalar": Operator("out", in_place=(0,)) for name in ["add", "sub", "mul", "div", "remainder", "fmod"]},
    **{
        f"aten.{name}.{kind}": Operator("out")
        for name in "eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor".split()
        for kind in ("Tensor", "Scalar")
    },
    **{f"aten.{name}.default": Operator("out") for name in ["logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_not"]},
    **{f"aten.{name}.default": Operator("out", in_place=(0, 1)) for name in ("maximum", "minimum", "atan2")},
    "aten.pow.Tensor_Scalar": Operator("out", in_place=(0,)),
    "aten.pow.Tensor_Tensor": Operator("out", in_place=(0, 1)),
    "aten.where.self": Operator("out", in_place=(1, 2)),
    "aten.addcmul.default": Operator("out", in_place=(0,)),
    "aten.addcdiv.default": Operator("out", in_place=(0,)),
    # gradients of activations: elementwise over the incoming gradient and one saved tensor
    **{
        f"aten.{name}.default": Operator("out", in_place=(0, 1))
        for name in (
            "gelu_backward tanh_backward sigmoid_backward silu_backward threshold_backward leaky_relu_backward "
            "hardtanh_backward softplus_backward hardsigmoid_backward"
        ).split()
    },
    "aten.elu_backward.default": Operator("out", in_place=(0,)),
    # matrix products
    "aten.mm.default": Operator("out"),
    "aten.bmm.default": Operator("out"),
    "aten.addmm.default": Operator("out"),
    "aten.baddbmm.default": Operator("out"),
    # softmax and the losses
    "aten._softmax.default": Operator("out", in_place=(0,)),
    "aten._log_softmax.default": Operator("out", in_place=(0,)),
    "aten._safe_softmax.default": Operator("out", scratch=_safe_softmax_scratch),
    "aten._softmax_backward_data.default": Operator("out", in_place=(0, 1)),
    "aten._log_softmax_backward_data.default": Operator("out", in_place=(0, 1)),
    "aten.nll_loss_forward.default": Operator("out"),
    "aten.nll_loss_backward.default": Operator("out", unread=(1,)),
    "aten.nll_loss2d_forward.default": Operator("out"),
    "aten.nll_loss2d_backward.default": Operator("out", unread=(1,)),
    "packhorse.nll_log_softmax_backward.default": Operator("out", in_place=(1,), scratch=_loss_scratch),
    "aten.mse_loss_backward.default": Operator("out", in_place=(1, 2)),
    # reductions
    "aten.sum.dim_IntList": Operator("out"),
    "aten.mean.dim": Operator("out"),
    "aten.sum.default": Operator("out"),
    "aten.mean.default": Operator("out"),
    "aten.cumsum.default": Operator("out"),
    "aten.max.dim": Operator("out"),
    "aten.min.dim": Operator("out"),
    "aten.amax.default": Operator("out"),
    "aten.amin.default": Operator("out"),
    # data movement
    "aten.clone.default": Operator("out"),
    "aten._to_copy.default": Operator("out"),
    "aten.lift_fresh_copy.default": Operator("out"),
    "aten.copy.default": Operator("out", unread=(0,)),
    "aten.fill.Scalar": Operator("out", unread=(0,)),
    "aten.masked_fill.Scalar": Operator("out", in_place=(0,)),
    "aten.slice_scatter.default": Operator("out", in_place=(0,)),
    "aten.select_scatter.default": Operator("out", in_place=(0,)),
    "aten.as_strided_scatter.default": Operator("out", in_place=(0,)),
    "aten.cat.default": Operator("out"),
    "aten.stack.default": Operator("out"),
    "aten.gather.default": Operator("out"),
    "aten.scatter.src": Operator("out"),
    "aten.scatter.value": Operator("out"),
    "aten.scatter_add.default": Operator("out"),
    "aten.index.Tensor": Operator("copy"),  # what it needs to expand the indices
    "aten.index_put.default": Operator("copy", in_place=(0,)),
    "aten.constant_pad_nd.default": Operator("out"),
    "aten.empty.memory_format": Operator("out"),
    "aten.empty_like.default": Operator("out", unread=(0,)),
    "aten.new_empty.default": Operator("out", unread=(0,)),
    "aten.new_empty_strided.default": Operator("out", unread=(0,)),
    "aten.rsub.Scalar": Operator("out", in_place=(0,)),
    "aten.index_select.default": Operator("out"),
    "aten.embedding.default": Operator("out"),
    "aten.embedding_dense_backward.default": Operator("out"),
    "packhorse.add_embedding_backward.default": Operator("copy", in_place=(0,), scratch=_rows_scratch),  # workspace: which rows there are
    # parts of a vocabulary (runtime/vocabulary.py); workspace of the gradients: which tokens are this rank's
    "packhorse.part_embedding.default": Operator("out", scratch=_part_embedding_scratch),
    "packhorse.part_embedding_backward.default": Operator("copy", scratch=_part_rows_scratch),
    "packhorse.add_part_embedding_backward.default": Operator("copy", in_place=(0,), scratch=_add_part_rows_scratch),
    "packhorse.vocab_stats.default": Operator("out", scratch=_vocab_stats_scratch),
    "packhorse.vocab_merge.default": Operator("out", scratch=_vocab_merge_scratch),
    "packhorse.vocab_log_probs.default": Operator("out", in_place=(0,)),
    "packhorse.vocab_nll.default": Operator("out", scratch=_vocab_loss_scratch),
    "packhorse.vocab_nll_backward.default": Operator("out", in_place=(1,), scratch=_vocab_loss_scratch),
    "aten.tril.default": Operator("out"),
    "aten.triu.default": Operator("out"),
    "aten.slice_backward.default": Operator("out"),
    "aten.select_backward.default": Operator("out"),
    # constants
    "aten.zeros.default": Operator("out"),
    "aten.ones.default": Operator("out"),
    "aten.full.default": Operator("out"),
    "aten.zeros_like.default": Operator("out", unread=(0,)),
    "aten.ones_like.default": Operator("out", unread=(0,)),
    "aten.full_like.default": Operator("out", unread=(0,)),
    "aten.new_zeros.default": Operator("out", unread=(0,)),
    "aten.new_ones.default": Operator("out", unread=(0,)),
    "aten.new_full.default": Operator("out", unread=(0,)),
    "aten.scalar_tensor.default": Operator("out"),
    "aten.arange.default": Operator("out"),
    "aten.arange.start": Operator("out"),
    "aten.arange.start_step": Operator("out"),
    # dropout: one byte an element is kept
    "aten.native_dropout.default": Operator("out"),
    "aten.native_dropout_backward.default": Operator("out"),
    "aten.bernoulli.p": Operator("adopt", unread=(0,)),
    "aten.rand_like.default": Operator("adopt", unread=(0,)),
    "aten.randn_like.default": Operator("adopt", unread=(0,)),
    # pooling: indices are kept, the input is not
    "aten.max_pool2d_with_indices.default": Operator("out"),
    "aten.max_pool2d_with_indices_backward.default": Operator("out", unread=(1,)),
    "aten.avg_pool2d.default": Operator("out"),
    "aten.avg_pool2d_backward.default": Operator("out", unread=(1,)),
    "aten._adaptive_avg_pool2d_backward.default": Operator("adopt", unread=(1,)),
    # convolution by im2col (the columns are workspace) or, for a 1x1 kernel, as a matrix product
    "aten._slow_conv2d_forward.default": Operator("copy"),
    "aten._slow_conv2d_backward.output_mask": Operator("copy"),
    # batch norm: running statistics are written where they live
    "aten._native_batch_norm_legit_functional.default": Operator("copy", updates=((3, 3), (4, 4))),  # 2 numbers a channel of workspace
    "aten._native_batch_norm_legit.no_stats": Operator("copy"),  # its mirror: statistics stay as they are
    # the random state before a draw, for its mirrors
    "packhorse.random_state.default": Operator("copy"),
    # the optimizer, on one run of flat storage with n state runs: what is new shares the storage of what was
    **{
        f"packhorse.optimize.{n}": Operator("out", updates=tuple((k, k) for k in range(n + 1)), scratch=_update_scratch)
        for n in range(MAX_STATES + 1)
    },
    # the same by the host, where what came for it may be changed in place
    **{
        f"{HOST_OPTIMIZE}{n}": Operator("out", (0,), updates=tuple((k, k) for k in range(n + 1)), scratch=_update_scratch, on_host=True)
        for n in range(MAX_STATES + 1)
    },
    # master weights take over what was changed in the model's own 16-bit parameters
    "packhorse.follow.default": Operator("out", updates=((0, 0),), scratch=_follow_scratch),
    HOST_FOLLOW: Operator("out", updates=((0, 0),), scratch=_follow_scratch, on_host=True),
    HOST_CONVERT: Operator("out", on_host=True),
    "packhorse.grad_norm.default": Operator("out", scratch=_norm_scratch),
    # collectives
    **{name: Operator("out") for name in (ALL_GATHER, ALL_GATHER_OTHERS, REDUCE_SCATTER, WAIT)},
    **{
        f"{name}{n}": Operator("out", updates=tuple((k, k) for k in range(n)))
        for name in (REDUCE_SCATTER_OWN, ALL_REDUCE)
        for n in range(1, MAX_REDUCED + 1)
    },
    TENSOR_SUM: Operator("out", in_place=(0,), scratch=_tensor_bucket),
    TENSOR_GATHER: Operator("out"),
    TENSOR_SCATTER: Operator("out", scratch=_tensor_bucket),
    **{name: Operator("out") for name in (OWN_SLICE, FROM_HOST)},
    TO_HOST: Operator("out", on_host=True),
    "packhorse.clip_coefficient.default": Operator("out"),
}


# what the device computes -> the same by the host
BY_HOST = {
    **{f"packhorse.optimize.{n}": f"{HOST_OPTIMIZE}{n}" for n in range(MAX_STATES + 1)},
    "packhorse.follow.default": HOST_FOLLOW,
    "aten._to_copy.default": HOST_CONVERT,
}
_BY_DEVICE = {host: device for device, host in BY_HOST.items()}


def computed_by_device(op: str) -> str:
    """The operator that does the same on the device, `op` itself if it is one of the device's."""
    return _BY_DEVICE.get(op, op)


def is_collective(op: str) -> bool:
    """The operator starts a collective that runs beside the computation, or waits for one."""
    return op in (ALL_GATHER, ALL_GATHER_OTHERS, WAIT) or op.startswith((REDUCE_SCATTER, REDUCE_SCATTER_OWN, ALL_REDUCE))


def is_tensor_collective(op: str) -> bool:
    """The operator is a collective over the axis `tp`, from its start to its end."""
    return op in (TENSOR_SUM, TENSOR_GATHER, TENSOR_SCATTER)


def is_copy(op: str) -> bool:
    """The operator starts a copy to the host or back."""
    return op in (TO_HOST, FROM_HOST)


def operator(name: str) -> Operator:
    """The row of an operator; ADOPT where it has none."""
    return OPERATORS.get(name, ADOPT)
