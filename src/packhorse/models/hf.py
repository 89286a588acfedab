"""Hugging Face models, unmodified, from files on this machine. Nothing is downloaded, no code of a repository is run, nothing is unpickled.

A model is built in float32, with dropout and all else as its config.json says; only the cache of generation is off (use_cache), since a
training step has no use for it.
"""

import copy
import difflib
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from packhorse.errors import CheckpointError, ConfigError, UserError

try:
    import transformers
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
except ImportError as error:
    raise UserError(
        f"a Hugging Face model needs the library transformers, version 5 ({error}); install it with: pip install 'packhorse[hf]'"
    ) from error

Objective = Literal["causal", "masked", "seq2seq"]

# objective -> model_type -> name of the class
_CLASSES: dict[Objective, Any] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
# What the constructors of the library raise at a config.json whose values do not go together.
_CONFIG_ERRORS = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RuntimeError, StrictDataclassError)


@dataclass(frozen=True)
class Source:
    """What a config.json says: the class of the model, its `config`, and what the class is trained for (None: nothing that has a loss here).

    `original` is the content of the file.
    """

    path: Path
    original: dict[str, Any]
    config: Any
    model_class: type[nn.Module]
    objective: Objective | None


def read_source(path: Path, objective: str = "auto") -> Source:
    """The config.json `path`, or the one in the folder `path`, and the class to build: for "auto" the one that it names under `architectures`.

    Raises ConfigError if the file is missing or damaged, its model_type is unknown (with the nearest known one), its values do not go
    together, it asks for quantized weights, or the model has no class for `objective`.
    """
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}; nothing is fetched from a hub: give a config.json, or the folder that holds one")
    path = path / "config.json" if path.is_dir() else path
    original = _read_json(path)
    config = _config(original, path)
    model_class, found = _class(config, objective, path)
    bidirectional = config.model_type in _CLASSES["masked"] and not config.is_encoder_decoder and not getattr(config, "is_decoder", True)
    if found == "causal" and bidirectional:
        raise ConfigError(
            f'{path}: {model_class.__name__} would see the tokens it has to predict, because "is_decoder" is false; '
            'set "is_decoder": true in it, or model.objective = "masked"'
        )
    return Source(path, original, config, model_class, found)


def build(source: Source) -> nn.Module:
    """The model in training mode, weights drawn from torch's ordinary generator as its own class draws them; on the current default device.

    Raises ConfigError if the values of the config.json do not go together.
    """
    config = copy.deepcopy(source.config)
    _use_cache(config, False)
    try:
        with quiet():
            return source.model_class(config).train()
    except _CONFIG_ERRORS as error:
        raise ConfigError(f"{source.path}: {source.model_class.__name__} cannot be built from it: {_flat(error)}; correct these values") from error


def load(source: Source, weights: Path) -> nn.Module:
    """The model in training mode, in float32 on the CPU, with the weights of `weights`: a .safetensors file, an index of them, or their folder.

    Parts that another head of the same architecture would use (a pooler, say) are left out with a warning.

    Raises CheckpointError if a file is missing, damaged or pickled; names are missing, left over or of another shape; or two weights that the
    config ties are there and differ.
    """
    given = read_weights(weights)
    config = copy.deepcopy(source.config)
    _use_cache(config, False)
    try:
        with quiet():
            model, info = source.model_class.from_pretrained(  # type: ignore[attr-defined]
                None, config=config, state_dict=given, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except _CONFIG_ERRORS as error:
        raise CheckpointError(f"{weights} cannot be loaded into {source.model_class.__name__}: {_flat(error)}; give weights of that model") from error
    _require_fit(source, weights, info)
    _require_tied(source, weights, model)
    return model.train()


def read_weights(weights: Path) -> dict[str, Tensor]:
    """name -> tensor of a .safetensors file, of an index of such files, or of the folder that holds either. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    for path, names in _files(weights).items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                present = set(file.keys())
                wanted = sorted(present if names is None else names)
                if absent := sorted(set(wanted) - present):
                    raise CheckpointError(f"{path} lacks {_some(absent)}, which its index says it holds; get a whole copy of the folder")
                tensors |= {name: file.get_tensor(name) for name in wanted}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read the weights {path}: {error}; get a whole copy of that file") from error
    return tensors


def weight_files(weights: Path) -> list[Path]:
    """The files that `load` would read, an index first. Raises CheckpointError as it does."""
    files = list(_files(weights))
    index = weights / _INDEX
    return files if files == [weights / _WEIGHTS] else [index, *files]


def restore_cache(model: nn.Module, source: Source) -> None:
    """Puts use_cache of the model's config back to what the config.json says, for a model that is given away."""
    ours: Any = model.config
    for part, given in ((ours, source.config), (ours.get_text_config(), source.config.get_text_config())):
        if hasattr(given, "use_cache"):
            part.use_cache = given.use_cache


def from_folder(folder: Path) -> nn.Module:
    """The model of a folder as Hugging Face's own Auto class for what the class is for loads it, in eval mode. Offline, safetensors only."""
    source = read_source(folder)
    auto: dict[Objective, Any] = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "seq2seq": transformers.AutoModelForSeq2SeqLM,
    }
    kind: Any = source.model_class if source.objective is None else auto[source.objective]
    with quiet():
        return kind.from_pretrained(str(folder), local_files_only=True, use_safetensors=True, trust_remote_code=False)


def ignores_shifted_labels(model: nn.Module) -> bool:
    """Whether the model's own loss passes over targets that are shifted already (`shift_labels`): whether a wrong number of them does no harm.

    A model on meta that does not run there, since the library looks at the values of positions, is believed. Changes nothing, draws nothing.
    """
    ids = torch.zeros(1, 4, dtype=torch.int64, device=next(model.parameters()).device)
    training = model.training
    with torch.random.fork_rng(), torch.no_grad():
        try:
            model.eval()(input_ids=ids, labels=ids, shift_labels=ids.new_zeros(1, 5))
        except TypeError as error:
            return "shift_labels" in str(error)
        except (RuntimeError, ValueError, IndexError):
            return False
        finally:
            model.train(training)
    return True


def max_seq_len(source: Source, model: nn.Module) -> int | None:
    """The most tokens of a sample that the model has positions for; None where the config sets no bound."""
    places = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(places, int) or places < 1:
        return None
    tables = [m for name, m in model.named_modules() if isinstance(m, nn.Embedding) and name.endswith("position_embeddings")]
    # RoBERTa and its kin count positions from the number after that of padding.
    lost = max((table.padding_idx + 1 for table in tables if table.padding_idx is not None and table.num_embeddings == places), default=0)
    return places - lost


def _config(original: dict[str, Any], path: Path) -> Any:
    kind = original.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        close = difflib.get_close_matches(str(kind).lower(), list(CONFIG_MAPPING.keys()), n=1, cutoff=0.7)
        hint = f"; the nearest that it knows is {close[0]!r}" if close else ""
        own_code = "; the code that it names under auto_map is not run" if "auto_map" in original else ""
        raise ConfigError(
            f"{path}: model_type is {kind!r}, which transformers {transformers.__version__} does not know{hint}{own_code}. "
            "Correct it, or install a version of transformers that has this architecture"
        )
    if original.get("quantization_config"):
        raise ConfigError(f"{path} asks for quantized weights (quantization_config), which cannot be trained; give the model's unquantized version")
    try:
        with quiet():
            return CONFIG_MAPPING[kind].from_dict(copy.deepcopy(original))
    except _CONFIG_ERRORS as error:
        raise ConfigError(f"{path} is no configuration of {kind!r}: {_flat(error)}; correct these values") from error


def _class(config: Any, objective: str, path: Path) -> tuple[type[nn.Module], Objective | None]:
    kind = config.model_type
    known = {name: classes[kind] for name, classes in _CLASSES.items() if kind in classes}
    if objective == "auto":
        named = (config.architectures or [None])[0]
        if named is None and len(known) == 1:
            named = next(iter(known.values()))
        if named is None:
            raise ConfigError(
                f"{path} names no class under architectures, and {kind!r} has {_listed(known)}; "
                "add it there, or say model.objective = 'causal' or 'masked'"
            )
        found = next((name for name, class_name in known.items() if class_name == named), None)
    else:
        if objective not in known:
            raise ConfigError(f"{path}: model.objective is {objective!r}, and {kind!r} has {_listed(known)}; choose another objective or model")
        named, found = known[objective], objective  # type: ignore[index, assignment]
    model_class = getattr(transformers, named, None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        close = difflib.get_close_matches(named, known.values(), n=1, cutoff=0)
        raise ConfigError(
            f"{path}: transformers {transformers.__version__} has no model {named!r}{f'; for {kind!r} it has {close[0]}' if close else ''}. "
            "Correct architectures in it"
        )
    return model_class, found


def _listed(known: dict[Objective, str]) -> str:
    return ", ".join(f"{class_name} ({name})" for name, class_name in known.items()) or "no class with a loss over text"


def _use_cache(config: Any, use: bool) -> None:
    for part in (config, config.get_text_config()):
        if hasattr(part, "use_cache"):
            part.use_cache = use


def _files(weights: Path) -> dict[Path, set[str] | None]:
    """File -> the names to take from it, None for all."""
    if weights.is_dir():
        for name in (_WEIGHTS, _INDEX):
            if (weights / name).exists():
                return _files(weights / name)
        pickled = sorted(p.name for p in weights.iterdir() if p.suffix in _PICKLED)
        seen = f"{pickled[0]} is pickled, and loading it could run code" if pickled else "none is there"
        raise CheckpointError(f"{weights} holds no {_WEIGHTS} or {_INDEX}: {seen}; save the model with save_pretrained(), which writes safetensors")
    if weights.suffix in _PICKLED:
        raise CheckpointError(
            f"{weights} is a pickled file, and loading it could run code; save the model with save_pretrained(), which writes {_WEIGHTS}"
        )
    if weights.name.endswith(".index.json"):
        return _indexed_files(weights)
    if weights.suffix != ".safetensors" or not weights.is_file():
        raise CheckpointError(f"there are no weights at {weights}; expected a .safetensors file, or the folder of one")
    return {weights: None}


def _indexed_files(index: Path) -> dict[Path, set[str] | None]:
    content = _read_json(index, CheckpointError).get("weight_map")
    if not isinstance(content, dict) or not content:
        raise CheckpointError(f"{index} has no weight_map, so it is no index of weights; get a whole copy of the folder")
    files: dict[Path, set[str] | None] = {}
    for name, file in content.items():
        # The index may come from anywhere: only a plain name may become a path.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} names the file {file!r}, which is no plain name of a .safetensors file; it is refused")
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent / file} is missing, and {index.name} says that {name!r} is in it; get a whole copy of the folder")
        found = files.setdefault(index.parent / file, set())
        assert found is not None
        found.add(name)
    return files


def _require_fit(source: Source, weights: Path, info: dict[str, Any]) -> None:
    unexpected = set(info["unexpected_keys"])
    wrong = sorted(f"{name} {list(seen)} (expected {list(wanted)})" for name, seen, wanted in info["mismatched_keys"])
    parts = [
        f"missing: {_some(sorted(info['missing_keys']))}" if info["missing_keys"] else "",
        f"of another shape: {_some(wrong)}" if wrong else "",
    ]
    if other := unexpected - _names_of_other_heads(source):
        parts.append(f"not in the model: {_some(sorted(other))}")
    if any(parts):
        raise CheckpointError(
            f"{weights} does not fit {source.model_class.__name__} of {source.path}: {'; '.join(filter(None, parts))}. "
            "Give the config.json that belongs to these weights, or leave model.weights out to start from drawn ones"
        )
    if unexpected:
        warnings.warn(
            f"{weights}: {_some(sorted(unexpected))} belong to another head than {source.model_class.__name__} and are left out", stacklevel=3
        )


def _names_of_other_heads(source: Source) -> set[str]:
    """Names of weights in the other models of this model_type that are published with it."""
    mappings = (modeling_auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES, modeling_auto.MODEL_MAPPING_NAMES)
    names: set[str] = set()
    for mapping in mappings:
        class_name = mapping.get(source.config.model_type)
        if isinstance(class_name, str) and hasattr(transformers, class_name):
            with torch.device("meta"), quiet():
                other = getattr(transformers, class_name)(copy.deepcopy(source.config))
            names |= set(other.state_dict()) | {f"{other.base_model_prefix}.{name}" for name in other.state_dict()}
    return names


def _require_tied(source: Source, weights: Path, model: nn.Module) -> None:
    with torch.device("meta"):
        wanted = _tied(build(source))
    found = _tied(model)
    if broken := [group for group in wanted if group not in found]:
        raise CheckpointError(
            f"{weights} holds different values for {' and '.join(sorted(broken[0]))}, which {source.path} ties to be one weight; "
            'set "tie_word_embeddings": false in it if the model has two, or give the weights that belong to it'
        )


def _tied(model: nn.Module) -> list[set[str]]:
    """Names of each parameter that has several."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def _read_json(path: Path, kind: type[UserError] = ConfigError) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise kind(f"cannot read {path}: {error.strerror}; give a {path.name} of Hugging Face, or the folder that holds one") from error
    except (ValueError, RecursionError) as error:
        raise kind(f"{path} is no JSON: {error}; get a whole copy of it") from error
    if not isinstance(found, dict):
        raise kind(f"{path} holds a {type(found).__name__}, expected an object with names and values; get a whole copy of it")
    return found


def _some(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _flat(error: BaseException) -> str:
    """The error's text in one line, since a message is one paragraph."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def quiet() -> Iterator[None]:
    """Inside it the library prints neither progress bars nor reports: what matters of them is said as errors here."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(log.CRITICAL)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
