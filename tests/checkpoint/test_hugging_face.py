"""A run out to a Hugging Face folder and in again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import packhorse as ph
from packhorse.checkpoint import read_checkpoint
from packhorse.checkpoint.reshard import reshard
from packhorse.errors import CheckpointError, ConfigError
from packhorse.train.build import build_model, build_optimizer, build_plan
from packhorse.train.config_file import config_from_dict, format_config, load_config

pytestmark = pytest.mark.cpu
transformers = pytest.importorskip("transformers")
bridge = pytest.importorskip("packhorse.checkpoint.hugging_face")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}


def silent(text):
    pass


@pytest.fixture
def trained(tmp_path):
    """trained(model=..., data=...) -> the folder of a run with one checkpoint, after a step on made-up tokens."""

    def make(name="run", data=None, **model):
        run = tmp_path / name
        config = config_from_dict(
            {"run": {"dir": str(run)}, "model": model, "data": {"seq_len": 12, "micro_batch_size": 2, "global_batch_size": 2} | (data or {})}
        )
        built = build_model(config)
        step = ph.compile(built, build_plan(config, ph, built, build_optimizer(config, built)))
        ids = torch.randint(200, (2, 12), generator=torch.Generator().manual_seed(0))
        names = {"gpt": ("ids", "labels"), "bert": ("ids", "labels")}.get(config.model.kind, step.plan.job.signature.leaves)
        step({name if isinstance(name, str) else name.path: ids.clone() for name in names})
        run.mkdir()
        (run / "config.toml").write_text(format_config(config))
        ph.save(run / "checkpoints" / "step-1", step, {"steps_done": 1})
        return run

    return make


@pytest.fixture
def config_json(tmp_path):
    """config_json(config) -> the path of its file."""

    def make(config, architecture):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config.to_dict() | {"architectures": [architecture]}))
        return str(path)

    return make


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_run_comes_out_as_what_from_pretrained_loads(trained, config_json, tmp_path, name):
    t = transformers
    config, architecture, auto = {
        "gpt2": (t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300, n_positions=16), "GPT2LMHeadModel", t.AutoModelForCausalLM),
        "llama": (t.LlamaConfig(**SMALL, tie_word_embeddings=False), "LlamaForCausalLM", t.AutoModelForCausalLM),
        "bert": (t.BertConfig(**SMALL), "BertForMaskedLM", t.AutoModelForMaskedLM),
    }[name]
    run, out, said = trained(kind="hf", config=config_json(config, architecture)), tmp_path / "out", []
    bridge.export_run(run, out, say=said.append)
    assert architecture in said[-1] and "bit for bit" in said[-1]
    loaded = auto.from_pretrained(out)
    saved, _ = read_checkpoint(run / "checkpoints" / "step-1")
    assert type(loaded).__name__ == architecture
    for parameter, tensor in loaded.named_parameters():
        assert torch.equal(tensor, saved[f"param/{parameter}"]), parameter
    assert {path.name for path in out.iterdir()} >= {"config.json", "model.safetensors"}
    written = json.loads((out / "config.json").read_text())
    assert written.get("use_cache", True) is config.use_cache and written["architectures"] == [architecture]
    assert (loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight) == config.tie_word_embeddings
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_checkpoint_of_several_ranks_comes_out_too(trained, config_json, tmp_path):
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    run = trained(kind="hf", config=config_json(config, "LlamaForCausalLM"))
    reshard(run / "checkpoints" / "step-1", run / "checkpoints" / "step-2", 5)
    for step in (1, 2):
        bridge.export_run(run, tmp_path / f"out-{step}", checkpoint=run / "checkpoints" / f"step-{step}", say=silent)
    one, other = (load_file(tmp_path / f"out-{step}" / "model.safetensors") for step in (1, 2))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_packhorses_own_gpt_comes_out_as_a_gpt2(trained, tmp_path):
    run, out, said = trained(layers=2, width=32, heads=4, dropout=0.1), tmp_path / "out", []
    bridge.export_run(run, out, say=said.append)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert isinstance(loaded, transformers.GPT2LMHeadModel) and loaded.config.resid_pdrop == 0.1
    ours, _ = read_checkpoint(run / "checkpoints" / "step-1")
    model = build_model(load_config(run / "config.toml"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(ours[f"param/{name}"])
    ids = torch.randint(256, (3, 12))
    loss = transformers.loss.loss_utils.ForCausalLMLoss(logits(loaded, ids), None, 256, shift_labels=ids)
    assert loss.item() == pytest.approx(model.eval()(ids, ids).item(), rel=1e-6)
    assert "e-0" in said[-1] and "of the largest" in said[-1]


def test_the_tokenizer_goes_with_it(trained, config_json, tmp_path):
    words = {word: n for n, word in enumerate(["[UNK]", "to", "be", "or", "not"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=300, n_positions=16)
    run = trained(data={"tokenizer": str(folder)}, kind="hf", config=config_json(config, "GPT2LMHeadModel"))
    bridge.export_run(run, tmp_path / "out", say=silent)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").encode("to be or not to be") == [1, 2, 3, 4, 1, 2]


def test_nothing_is_overwritten(trained, tmp_path):
    run = trained(layers=1, width=16, heads=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds something already"):
        bridge.export_run(run, tmp_path / "out", say=silent)
    with pytest.raises(CheckpointError, match="holds something already"):
        bridge.import_folder(tmp_path, tmp_path / "out", say=silent)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    (tmp_path / "empty").mkdir()
    bridge.export_run(run, tmp_path / "empty", say=silent)
    assert (tmp_path / "empty" / "config.json").exists()


def test_what_cannot_be_exported_is_one_paragraph(trained, tmp_path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        bridge.export_run(tmp_path / "absent", tmp_path / "out", say=silent)
    run = trained("bert", kind="bert", layers=1, width=16, heads=2)
    with pytest.raises(ConfigError, match="own 'bert', for which Hugging Face has no class"):
        bridge.export_run(run, tmp_path / "out", say=silent)
    run = trained("gpt", layers=1, width=16, heads=2)
    changed = load_config(run / "config.toml", ["model.width=32"])
    (run / "config.toml").write_text(format_config(changed))
    with pytest.raises(CheckpointError, match=r"does not fit .* expected \(256, 32\)"):
        bridge.export_run(run, tmp_path / "out", say=silent)
    (run / "checkpoints" / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        bridge.export_run(run, tmp_path / "out", say=silent)
    assert not (tmp_path / "out").exists()


def test_an_export_that_is_another_model_is_not_kept(trained, tmp_path, monkeypatch):
    run = trained(layers=1, width=16, heads=2)
    original = bridge.as_gpt2

    def spoiled(model, **options):
        made = original(model, **options)
        with torch.no_grad():
            made.transformer.h[0].mlp.c_fc.weight += 0.01
        return made

    monkeypatch.setattr(bridge, "as_gpt2", spoiled)
    with pytest.raises(CheckpointError, match="another model than that of the run"):
        bridge.export_run(run, tmp_path / "out", say=silent)
    assert not (tmp_path / "out").exists()


def folder_of_model(path: Path) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=300, n_positions=64))
    model.save_pretrained(path)
    return model


def test_a_folder_comes_in_as_a_run_that_begins_with_its_weights(tmp_path):
    model, said = folder_of_model(tmp_path / "model"), []
    bridge.import_folder(tmp_path / "model", tmp_path / "run", say=said.append)
    assert f"packhorse train {tmp_path / 'run' / 'config.toml'}" in said[-1]
    config = load_config(tmp_path / "run" / "config.toml")
    assert config.run.resume == "auto" and config.data.seq_len == 64 and config.data.tokenizer == "bytes"
    built = build_model(config)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), built.state_dict().values()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run"]


def test_a_folder_that_does_not_fit_leaves_no_run(tmp_path):
    folder_of_model(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors.pop("transformer.ln_f.weight")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: transformer.ln_f.weight"):
        bridge.import_folder(tmp_path / "model", tmp_path / "run", say=silent)
    with pytest.raises(ConfigError, match="there is no folder"):
        bridge.import_folder(tmp_path / "absent", tmp_path / "run", say=silent)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
