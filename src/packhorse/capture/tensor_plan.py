"""Which parameter of a model is cut how over the tp ranks: a plan of name patterns -> a `Sharding` (Shoeybi et al. 2019, section 3).

A plan says of modules whether they are cut by columns, by rows or by vocabulary (tensor_style.py). What the caller says comes first, then the plan
that the model's class carries (an attribute `tensor_plan`), then known_plans.py, then Hugging Face's own (`_tp_plan`). Everything is refused here,
before anything is captured or allocated.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from packhorse.capture.known_plans import known_plan
from packhorse.capture.tensor_degree import Share, heads_at, require_degree
from packhorse.capture.tensor_names import is_transposed, matching, near, no_plan
from packhorse.capture.tensor_style import Style, is_known, style_of
from packhorse.capture.trace import distinct
from packhorse.errors import UserError
from packhorse.mesh import Mesh
from packhorse.parallel.split import Sharding, Split

PADDED_TO = 128  # entries of the vocabulary that each rank has a multiple of, where the degree does not divide it (section 5.1 of the paper)
_KEYS_AND_VALUES = {"k", "v", "key", "value", "k_proj", "v_proj", "key_proj", "value_proj", "k_lin", "v_lin", "wk", "wv"}


@dataclass(frozen=True)
class _Source:
    """Where a plan comes from. at: the module that it is for. strict: its patterns have to match, since a person wrote them for this model."""

    name: str
    at: str
    plan: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True)
class _Cut:
    """What a plan says of a parameter. sizes: of the blocks that the dim is made of; a vocabulary has one. None for dim: whole.

    level: of its source, the lowest counts. said: in the plan's own words. shares: what has to be dealt out for it.
    """

    level: int
    said: str
    dim: int | None
    sizes: tuple[int, ...] = ()
    vocab: bool = False
    shares: tuple[Share, ...] = ()

    @property
    def meaning(self) -> tuple:
        return (self.dim, self.sizes, self.vocab)


class _Reading:
    """What is said of a model so far. cuts: by parameter name, of each name of a tied one. heads: names of the modules that make logits."""

    def __init__(self, model: nn.Module, degree: int) -> None:
        self.model, self.degree = model, degree
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.heads = _output_heads(self.modules)
        self.cuts: dict[str, _Cut] = {}


def sharding_of(
    model: nn.Module, mesh: Mesh, rank: int, tensor_plan: Mapping[str, Any] | None = None, sequence_parallel: bool = False
) -> Sharding | None:
    """How the parameters of `model` lie over the tp ranks of `mesh`, seen by `rank`; None where tp is 1, which needs no plan.

    tensor_plan: module-name pattern -> style. In a pattern `*` stands for one component of a name, and what comes before it in the module's
    name may be left out: "layers.*.self_attn.q_proj". A pattern may also name a parameter itself. Of several that match the last counts. What none
    matches is as the model's own plan says; "whole" leaves it whole. The output head is cut over the vocabulary unless the plan leaves it whole.
    Raises UserError where the plan does not fit the model or the degree.
    """
    if mesh.tp == 1:
        if sequence_parallel:
            raise UserError("sequence_parallel=True: the sequence is cut over the tp ranks, and the mesh has tp=1; give a mesh with tp=2 or more")
        return None
    reading = _Reading(model, mesh.tp)
    for level, source in enumerate(_sources(model, tensor_plan)):
        _read(reading, source, level)
    if all(cut.dim is None for cut in reading.cuts.values()):
        raise UserError(no_plan(model, mesh.tp))
    _heads_over_vocabulary(reading)
    counted = {name: _agreed(reading, names) for name, names in _names(reading.parameters).items()}
    require_degree([share for cut in counted.values() if cut is not None for share in cut.shares], mesh.tp)
    splits = {name: _split(cut, mesh.tp) for name, cut in counted.items() if cut is not None and cut.dim is not None}
    return Sharding(mesh.tp, mesh.tp_rank(rank), MappingProxyType(splits), sequence_parallel)


def _sources(model: nn.Module, given: Mapping[str, Any] | None) -> Iterator[_Source]:
    """What is said of the model, the most important first."""
    if given is not None:
        if not isinstance(given, Mapping):
            raise UserError(
                f"tensor_plan is a {type(given).__name__}, expected a dict of module-name patterns and styles such as "
                '{"layers.*.mlp.up_proj": "column", "layers.*.mlp.down_proj": "row"}'
            )
        yield _Source("tensor_plan", "", given, True)
    inside: tuple[str, ...] = ()  # of what Hugging Face's parts say, the whole says all
    for name, module in model.named_modules():
        kind, own = type(module).__name__, getattr(module, "tensor_plan", None)
        if own:
            yield _Source(f"{kind}.tensor_plan", name, own, True)
        if not name.startswith(inside):
            known, theirs = known_plan(getattr(module, "config", None)), getattr(module, "_tp_plan", None) or {}
            yield _Source(f"the plan of {kind}", name, known, False)
            yield _Source(f"{kind}'s own plan", name, theirs, False)
            inside = (*inside, f"{name}." if name else "") if known or theirs else inside


def _read(reading: _Reading, source: _Source, level: int) -> None:
    prefix = f"{source.at}." if source.at else ""
    theirs: dict[str, _Cut] = {}
    for pattern, said in source.plan.items():
        where = f"{source.name}[{pattern!r}]"
        matched = matching(pattern, reading.modules, prefix) or matching(pattern, reading.parameters, prefix)
        if not matched and source.strict:
            raise UserError(f"{where} matches no module of {type(reading.model).__name__}{near(pattern, reading.model)}")
        if not source.strict:
            # what a plan of others says in words that are not known here may be said by the caller
            matched = [name for name in matched if not all(p in reading.cuts for p in _below(reading, name))]
            if matched and not (is_known(said) or isinstance(said, tuple)):
                raise UserError(
                    f"{where} = {said!r}: this version knows no such way to cut {matched[0]}; say how in tensor_plan, for example "
                    f'{{"{pattern}": "whole"}} to have all of it on every rank'
                )
        for name in matched:
            theirs |= _cut(reading, name, style_of(said, where), f"{where} = {said!r}", level, source.strict)
    reading.cuts = theirs | reading.cuts


def _cut(reading: _Reading, name: str, style: Style, said: str, level: int, strict: bool) -> dict[str, _Cut]:
    """Parameter -> what a style does to it, of a module or a parameter named `name`."""
    whole = {parameter: _Cut(level, said, None) for parameter in _below(reading, name)}
    if style.kind == "whole":
        return whole
    if name not in reading.modules:
        return {name: _cut_parameter(reading, name, style, said, level)}
    module = reading.modules[name]
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not (isinstance(module, nn.Linear | nn.Embedding) or is_transposed(module)):
        seen = f"a {type(module).__name__}" + ("" if weight is None else f" with a weight of {list(weight.shape)}")
        raise UserError(
            f"{said}: {name or 'the model itself'} is {seen}, which has no weight that can be cut so; name linear layers, embeddings, "
            "or a parameter by its own name, or say 'whole'"
        )
    vocab = style.kind == "vocab"
    if isinstance(module, nn.Embedding):
        if not vocab:
            raise UserError(f"{said}: {name} is an embedding, which is cut over its entries; say 'vocab', or 'whole' to have all of it on every rank")
    elif name in reading.heads:
        if style.kind == "row" and strict:
            raise UserError(f"{said}: {name} is the output head, which is cut over the vocabulary; say 'vocab', or 'whole' to have all on every rank")
        style, vocab = Style("vocab"), True
    outputs = 1 if is_transposed(module) else 0
    dim = 1 - outputs if style.kind == "row" else outputs
    sizes = _sizes(weight.shape[dim], style, said, name)
    shares = () if vocab else _shares(reading, name, sizes, style)
    if not vocab and _stays_whole(reading, name):
        return {**whole, f"{name}.weight": _Cut(level, said, None, shares=shares)}
    made = {**whole, f"{name}.weight": _Cut(level, said, dim, sizes, vocab, shares)}
    if f"{name}.bias" in made and style.kind != "row":
        made[f"{name}.bias"] = _Cut(level, said, 0, sizes, vocab, shares)
    return made


def _cut_parameter(reading: _Reading, name: str, style: Style, said: str, level: int) -> _Cut:
    """Of a parameter that is named itself: columns are the last dim but one (outputs, inputs), of a vector its only one; rows the last."""
    shape = reading.parameters[name].shape
    if not shape or (style.kind == "row" and len(shape) < 2):
        raise UserError(f"{said}: {name} of shape {list(shape)} has no dim that can be cut so; say {'column or ' if shape else ''}whole")
    dim = {"column": max(len(shape) - 2, 0), "row": len(shape) - 1, "vocab": 0}[style.kind]
    sizes = _sizes(shape[dim], style, said, name)
    vocab = style.kind == "vocab"
    return _Cut(level, said, dim, sizes, vocab, () if vocab else _shares(reading, name, sizes, style))


def _sizes(size: int, style: Style, said: str, name: str) -> tuple[int, ...]:
    """Of the blocks of a dim of `size`. Raises UserError if it is not made of them."""
    sizes = style.blocks if isinstance(style.blocks, tuple) else (size // style.blocks,) * style.blocks
    if sum(sizes) != size:
        wanted = f"blocks of {list(sizes)}" if isinstance(style.blocks, tuple) else f"{style.blocks} equal blocks"
        raise UserError(
            f"{said}: the dim of {name} that is cut has {size} elements, which are not made of {wanted}; give sizes that add up to {size}"
        )
    return sizes


def _shares(reading: _Reading, name: str, sizes: tuple[int, ...], style: Style) -> tuple[Share, ...]:
    """What the cut of a module asks of the degree."""
    heads, key_heads, attention = heads_at(reading.modules, name)
    what = "outputs" if style.kind == "column" else "inputs"
    blocks = [Share(f"{name} has {size} {what}{' in a block' if len(sizes) > 1 else ''}", size) for size in dict.fromkeys(sizes)]
    if not attention or heads is None or style.kind == "row":
        return tuple(blocks)
    shares = [Share(f"{name} is of an attention with {heads} heads", heads)]
    if key_heads is not None and key_heads != heads:
        keys = _is_keys_or_values(name)
        if keys or len(sizes) > 1:  # several blocks: queries, keys and values in one
            shares.append(Share(f"{name} is of an attention with {key_heads} key/value heads", key_heads, repeats=keys))
        if keys:
            return tuple(shares)
    return (*shares, *blocks)


def _is_keys_or_values(name: str) -> bool:
    return name.rpartition(".")[2] in _KEYS_AND_VALUES


def _stays_whole(reading: _Reading, name: str) -> bool:
    """Keys and values of fewer heads than ranks: every rank has all of them, and takes what its queries need."""
    _, key_heads, attention = heads_at(reading.modules, name)
    return attention and key_heads is not None and _is_keys_or_values(name) and key_heads < reading.degree and reading.degree % key_heads == 0


def _output_heads(modules: Mapping[str, nn.Module]) -> set[str]:
    heads = [module.get_output_embeddings() for module in modules.values() if hasattr(module, "get_output_embeddings")]  # type: ignore[operator]
    named = {name for name, module in modules.items() if any(module is head for head in heads) or name.rpartition(".")[2] == "lm_head"}
    return {name for name in named if isinstance(modules[name], nn.Linear)}


def _heads_over_vocabulary(reading: _Reading) -> None:
    """The output head is cut over the vocabulary where no plan says anything of it."""
    last = max(cut.level for cut in reading.cuts.values()) + 1
    for name in reading.heads:
        for parameter in _below(reading, name):
            reading.cuts.setdefault(parameter, _Cut(last, f"the output head {name}", 0, (reading.parameters[parameter].shape[0],), vocab=True))


def _names(parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """First name of each distinct parameter -> all its names."""
    first = {id(parameter): name for name, parameter in distinct(parameters.items()).items()}
    names: dict[str, list[str]] = {name: [] for name in first.values()}
    for name, parameter in parameters.items():
        names[first[id(parameter)]].append(name)
    return names


def _agreed(reading: _Reading, names: list[str]) -> _Cut | None:
    """What counts of all that is said of one parameter, which may have several names. Raises UserError where that is not one thing."""
    said = [(name, reading.cuts[name]) for name in names if name in reading.cuts]
    if not said:
        return None
    level = min(cut.level for _, cut in said)
    counted = [(name, cut) for name, cut in said if cut.level == level]
    name, cut = counted[0]
    for other, theirs in counted[1:]:
        if theirs.meaning != cut.meaning:
            raise UserError(
                f"{name} and {other} are one weight (tied), and the plan cuts it in two ways: {cut.said}, {theirs.said}; say the same of both, or "
                "name one of them only, which the other follows"
            )
    return cut


def _split(cut: _Cut, degree: int) -> Split:
    assert cut.dim is not None
    if not cut.vocab or cut.sizes[0] % degree == 0:
        return Split(cut.dim, cut.sizes)
    whole = PADDED_TO * degree
    padded = -(-cut.sizes[0] // whole) * whole
    return Split(cut.dim, (padded,), padded - cut.sizes[0])


def _below(reading: _Reading, name: str) -> list[str]:
    """The parameters of a module and of all in it, or the parameter of that name."""
    prefix = f"{name}." if name else ""
    return [parameter for parameter in reading.parameters if parameter == name or parameter.startswith(prefix)]
