"""A run -> a folder that Hugging Face's from_pretrained loads, and such a folder -> a run that begins with its weights."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packhorse.checkpoint.layout import STAGING_PREFIX
from packhorse.checkpoint.model import load_model
from packhorse.checkpoint.newest import newest_checkpoint
from packhorse.data.tokenizer import BYTES
from packhorse.errors import CheckpointError, ConfigError
from packhorse.models import hf
from packhorse.models.gpt import GPT
from packhorse.models.gpt2 import as_gpt2
from packhorse.train.build import build_model
from packhorse.train.config import Config, DataConfig, ModelConfig, RunConfig
from packhorse.train.config_file import format_config, load_config
from packhorse.train.run_folder import RunFolder
from packhorse.train.task import source_of

Say = Callable[[str], None]

# Where import_folder puts the model, inside the run's folder.
MODEL = "model"
_TOKENIZER = "tokenizer.json"
_BESIDE_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
# Our own GPT and GPT-2 are one function; what their matrix products round differently is below this share of the largest logit.
_ROUNDING = 1e-5
# The library holds the bytes of a whole file in memory, beside the model, while it writes it.
_SHARD = "1GB"


def export_run(run: Path, out: Path, *, checkpoint: Path | None = None, say: Say) -> None:
    """Writes the model of the run folder `run` at `checkpoint`, by default its newest whole one, as the folder `out`: config.json,
    model.safetensors (several files of 1 GB for a larger model), and the files of the run's tokenizer. It is there whole or not at all. Parameters
    are read one at a time, whatever number of ranks saved them; the model is in memory once, and optimizer states never.

    Before that it is loaded by Hugging Face's from_pretrained, and its logits on a batch must be those of the run's model bit for bit (for
    model.kind "gpt", which becomes a GPT-2, to 1e-5 of the largest; the difference is said).

    Raises ConfigError for a model that Hugging Face has no like of, or if `run` is no run; CheckpointError if there is no whole checkpoint, it
    does not fit, `out` holds something, cannot be written, or does not load as the same model.
    """
    config = _config_of(run)
    if config.model.kind not in ("hf", "gpt"):
        raise ConfigError(
            f"the model of {run} is packhorse's own {config.model.kind!r}, for which Hugging Face has no class; models of kind 'hf' and 'gpt' can be "
            "exported. Its weights are in the checkpoint's tensors.safetensors, under names that begin with param/"
        )
    _require_free(out)
    found = checkpoint or newest_checkpoint(RunFolder(run).checkpoints, say)
    if found is None:
        raise CheckpointError(f"there is no whole checkpoint in {RunFolder(run).checkpoints}; train the run first, or give one with --checkpoint")
    model = build_model(replace(config, model=replace(config.model, weights=None)))
    load_model(model, found)
    staging = out.absolute().with_name(f"{STAGING_PREFIX}{out.name}-{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        vocab = _write(config, model, staging)
        _write_tokenizer(config, staging)
        ids = torch.randint(vocab, (2, config.data.seq_len), generator=torch.Generator().manual_seed(0))
        ours = _logits(model.eval(), ids)
        del model  # one model in memory at a time
        agreement = _require_same_logits(config, ours, ids, staging)
        if out.is_dir():
            out.rmdir()  # it is empty
        staging.rename(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror or error} ({error.filename}); free space or choose another folder") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    say(f"{found} written to {out}; loaded again by from_pretrained, {agreement}")


def import_folder(folder: Path, run: Path, *, say: Say) -> None:
    """Begins the run folder `run` from a Hugging Face model: its files are copied to RUN/model, and RUN/config.toml trains from there.

    The weights are loaded once, so that what is wrong with them is said now. The configuration has this project's defaults; settings are
    changed in the file or by --set.

    Raises ConfigError or CheckpointError if the model cannot be trained on text or its weights do not fit, or if `run` holds something.
    """
    _require_free(run)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; give the folder of a Hugging Face model: config.json and model.safetensors")
    staging = run.absolute().with_name(f"{STAGING_PREFIX}{run.name}-{os.getpid()}")
    model = str(run / MODEL)
    try:
        tokenizer = model if (folder / _TOKENIZER).is_file() else BYTES
        config = Config(run=RunConfig(dir=str(run), resume="auto"), model=ModelConfig(kind="hf", config=model, weights=model))
        seq_len = _seq_len(folder, config.data.seq_len)
        config = replace(config, data=DataConfig(tokenizer=tokenizer, seq_len=seq_len))
        (staging / MODEL).mkdir(parents=True)
        for path in (folder / "config.json", *hf.weight_files(folder), *_tokenizer_files(folder)):
            shutil.copyfile(path, staging / MODEL / path.name)
        (staging / "config.toml").write_text(format_config(config), encoding="utf-8")
        if run.is_dir():
            run.rmdir()
        staging.rename(run)
    except OSError as error:
        raise CheckpointError(f"cannot copy {folder} to {run}: {error.strerror or error} ({error.filename}); free space or choose another") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    say(f"{folder} copied to {run / MODEL}; train with: packhorse train {run / 'config.toml'} --set data.corpus=FOLDER")


def _config_of(run: Path) -> Config:
    folder = RunFolder(run)
    if not folder.config.is_file():
        raise ConfigError(f"{run} is not the folder of a run: it has no {folder.config.name}; give the run.dir of one")
    return load_config(folder.config)


def _require_free(out: Path) -> None:
    if out.is_symlink() or (out.exists() and not out.is_dir()) or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} holds something already, and it is not overwritten; choose a folder that does not exist yet")


def _seq_len(folder: Path, default: int) -> int:
    """The sample length to begin with, after a look at the whole model. Raises what building and loading it does."""
    probe = Config(model=ModelConfig(kind="hf", config=str(folder), weights=str(folder)), data=DataConfig(seq_len=1))
    places = hf.max_seq_len(source_of(probe.model), build_model(probe))
    return default if places is None else min(default, places)


def _write(config: Config, model: nn.Module, staging: Path) -> int:
    """Writes the model as the library writes it, and returns how many tokens it knows."""
    made: Any = model if config.model.kind == "hf" else _gpt2(config, model)
    if config.model.kind == "hf":
        hf.restore_cache(made, source_of(config.model))
    with hf.quiet():
        made.save_pretrained(staging, max_shard_size=_SHARD)
    return made.config.get_text_config().vocab_size


def _gpt2(config: Config, model: nn.Module) -> nn.Module:
    assert isinstance(model, GPT) and config.model.dropout is not None
    return as_gpt2(model, dropout=config.model.dropout)


def _tokenizer_files(folder: Path) -> list[Path]:
    names = (_TOKENIZER, *_BESIDE_TOKENIZER)
    return [folder / name for name in names if (folder / name).is_file()] if (folder / _TOKENIZER).is_file() else []


def _write_tokenizer(config: Config, staging: Path) -> None:
    if config.data.tokenizer == BYTES:
        return
    given = Path(config.data.tokenizer).expanduser()
    given = given / _TOKENIZER if given.is_dir() else given
    if not given.is_file():
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} of the run is not there any more ({given}); put it back, or correct config.toml"
        )
    shutil.copyfile(given, staging / _TOKENIZER)
    for name in _BESIDE_TOKENIZER:
        if (given.parent / name).is_file():
            shutil.copyfile(given.parent / name, staging / name)
    if not (staging / "tokenizer_config.json").exists():
        # Without it the library would take the tokenizer class of the architecture, which may read the file otherwise.
        (staging / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8")


def _require_same_logits(config: Config, ours: Tensor, ids: Tensor, staging: Path) -> str:
    """What was compared, in words. Raises CheckpointError if the folder is another model than that whose logits on `ids` are `ours`."""
    reloaded: Any = hf.from_folder(staging)
    theirs = _logits(reloaded.eval(), ids)
    if config.model.kind == "hf" and torch.equal(ours, theirs):
        return f"{reloaded.__class__.__name__} gives the same {ours.numel():,} logits on a batch, bit for bit"
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    if config.model.kind == "gpt" and difference <= _ROUNDING:
        return f"{reloaded.__class__.__name__} gives the same {ours.numel():,} logits on a batch to {difference:.1e} of the largest"
    raise CheckpointError(
        f"what from_pretrained loads is another model than that of the run: its logits on a batch differ by up to {difference:.1e} of the largest; "
        "nothing was written. This is a fault of packhorse or of the library transformers, please report it"
    )


@torch.no_grad()
def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    if not isinstance(model, GPT):
        return model(input_ids=ids).logits
    heard: list[Tensor] = []  # its forward gives the loss alone
    with model.head.register_forward_hook(lambda module, inputs, output: heard.append(output)):
        model(ids, ids)
    return heard[0]
