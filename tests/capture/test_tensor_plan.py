"""Which parameter is cut how: each model's splits, written by hand from its modules, and what is refused."""

import re
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from packhorse.capture.known_plans import FAMILIES
from packhorse.capture.tensor_plan import sharding_of
from packhorse.errors import UserError
from packhorse.mesh import Mesh
from packhorse.models.bert import BERT
from packhorse.models.gpt import GPT
from packhorse.models.lstm import LSTM
from packhorse.parallel.split import Split
from packhorse.train.config_file import config_from_dict

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.cpu

SMALL = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def made(name, **config):
    """The model of a class name such as LlamaForCausalLM, without memory."""
    base = re.sub("For.*|LMHead.*", "", name)
    config_class = getattr(transformers, {"Gemma3": "Gemma3TextConfig"}.get(base, f"{base}Config"))
    with torch.device("meta"):
        return getattr(transformers, name)(config_class(bos_token_id=None, eos_token_id=None, pad_token_id=None, **config))


def splits(model, tp=2, plan=None, **options):
    return dict(sharding_of(model, Mesh(tp=tp), 0, plan, **options).splits)


def starred(model, tp=2, plan=None):
    """Pattern -> (dim, blocks, padding), asserting that layers are cut alike."""
    found = {}
    for name, split in splits(model, tp, plan).items():
        key, value = re.sub(r"\.\d+\.", ".*.", name, count=1), (split.dim, split.blocks, split.padding)
        assert found.setdefault(key, value) == value, name
    return found


def llama_layer(prefix, keys=16, cut_keys=True):
    attention, mlp = f"{prefix}layers.*.self_attn.", f"{prefix}layers.*.mlp."
    key_splits = {f"{attention}{part}_proj.weight": (0, (keys,), 0) for part in "kv"} if cut_keys else {}
    return key_splits | {
        f"{attention}q_proj.weight": (0, (32,), 0),
        f"{attention}o_proj.weight": (1, (32,), 0),
        f"{mlp}gate_proj.weight": (0, (64,), 0),
        f"{mlp}up_proj.weight": (0, (64,), 0),
        f"{mlp}down_proj.weight": (1, (64,), 0),
    }


VOCAB = (0, (96,), 0)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mistral", "Gemma", "Gemma3"])
@pytest.mark.parametrize("tied", [False, True])
def test_hugging_faces_own_plan_is_understood(name, tied):
    model = made(f"{name}ForCausalLM", **SMALL, num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied)
    expected = llama_layer("model.") | {"model.embed_tokens.weight": VOCAB} | ({} if tied else {"lm_head.weight": VOCAB})
    assert starred(model) == expected
    whole = [n for n, p in model.named_parameters() if "norm" in n]
    assert whole and not set(whole) & set(splits(model))


def test_keys_and_values_of_fewer_heads_than_ranks_are_whole():
    model = made("Qwen2ForCausalLM", **SMALL, num_key_value_heads=2)  # its projections have biases
    biases = {f"model.layers.*.self_attn.{part}_proj.bias": (0, (size,), 0) for part, size in (("q", 32), ("k", 16), ("v", 16))}
    ends = {"model.embed_tokens.weight": VOCAB, "lm_head.weight": VOCAB}
    assert starred(model, 2) == llama_layer("model.") | biases | ends
    alone = {key: value for key, value in biases.items() if "q_proj" in key}
    assert starred(model, 4) == llama_layer("model.", cut_keys=False) | alone | ends
    # one head of 4 channels, which 8 ranks have whole: no matter that they do not divide it
    single = made("LlamaForCausalLM", **SMALL | {"num_attention_heads": 8}, num_key_value_heads=1)
    assert starred(single, 8) == llama_layer("model.", cut_keys=False) | ends


def test_gpt2_has_its_weights_transposed_and_three_blocks_in_one():
    model = made("GPT2LMHeadModel", vocab_size=50257, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    h, third = "transformer.h.*.", (32, 32, 32)
    layer = {
        f"{h}attn.c_attn.weight": (1, third, 0),
        f"{h}attn.c_attn.bias": (0, third, 0),
        f"{h}attn.c_proj.weight": (0, (32,), 0),
        f"{h}mlp.c_fc.weight": (1, (128,), 0),
        f"{h}mlp.c_fc.bias": (0, (128,), 0),
        f"{h}mlp.c_proj.weight": (0, (128,), 0),
    }
    # 50257 = 196 * 256 + 81 = 98 * 512 + 81: up to 197 * 256 and 99 * 512
    assert starred(model, 2) == layer | {"transformer.wte.weight": (0, (50432,), 175)}
    assert starred(model, 4) == layer | {"transformer.wte.weight": (0, (50688,), 431)}


def bert_layer(layer, names=("attention.self.query", "attention.self.key", "attention.self.value", "intermediate.dense")):
    columns = {f"{layer}{name}.{kind}": (0, (64 if "inter" in name else 32,), 0) for name in names for kind in ("weight", "bias")}
    return columns | {f"{layer}attention.output.dense.weight": (1, (32,), 0), f"{layer}output.dense.weight": (1, (64,), 0)}


@pytest.mark.parametrize(
    ("name", "base", "ends"),
    [
        ("Bert", "bert", ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias")),
        ("Roberta", "roberta", ("roberta.embeddings.word_embeddings.weight", "lm_head.bias")),
        ("XLMRoberta", "roberta", ("lm_head.decoder.weight", "lm_head.bias")),  # of these two the head comes first
        ("Camembert", "roberta", ("lm_head.decoder.weight", "lm_head.bias")),
    ],
)
def test_bert_and_its_kin(name, base, ends):
    """Weight and bias of the decoder are tied, to the embedding and to a bias of the head; the first name of each counts."""
    model = made(f"{name}ForMaskedLM", **SMALL)
    assert starred(model) == bert_layer(f"{base}.encoder.layer.*.") | dict.fromkeys(ends, VOCAB)
    padded = starred(made(f"{name}ForMaskedLM", **SMALL | {"vocab_size": 97}))
    assert {key: padded[key] for key in ends} == dict.fromkeys(ends, (0, (256,), 159))


def test_electra():
    model = made("ElectraForMaskedLM", **SMALL, embedding_size=16)
    ends = {"electra.embeddings.word_embeddings.weight": VOCAB, "generator_lm_head.bias": VOCAB}
    assert starred(model) == bert_layer("electra.encoder.layer.*.") | ends


def test_opt_gpt_neo_distilbert_bloom():
    def columns(sizes):
        return {f"{name}.{kind}": (0, (size,), 0) for name, size in sizes.items() for kind in ("weight", "bias")}

    opt = made("OPTForCausalLM", vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64, word_embed_proj_dim=32)
    layer = "model.decoder.layers.*."
    assert starred(opt) == columns({f"{layer}self_attn.{part}_proj": 32 for part in "qkv"} | {f"{layer}fc1": 64}) | {
        f"{layer}self_attn.out_proj.weight": (1, (32,), 0),
        f"{layer}fc2.weight": (1, (64,), 0),
        "model.decoder.embed_tokens.weight": VOCAB,
    }
    neo = made("GPTNeoForCausalLM", vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]])
    layer = "transformer.h.*."
    assert starred(neo) == columns({f"{layer}mlp.c_fc": 128}) | {
        **{f"{layer}attn.attention.{part}_proj.weight": (0, (32,), 0) for part in "qkv"},
        f"{layer}attn.attention.out_proj.weight": (1, (32,), 0),
        f"{layer}mlp.c_proj.weight": (1, (128,), 0),
        "transformer.wte.weight": VOCAB,
    }
    distil = made("DistilBertForMaskedLM", vocab_size=96, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
    layer = "distilbert.transformer.layer.*."
    assert starred(distil) == columns({f"{layer}attention.{part}_lin": 32 for part in "qkv"} | {f"{layer}ffn.lin1": 64}) | {
        f"{layer}attention.out_lin.weight": (1, (32,), 0),
        f"{layer}ffn.lin2.weight": (1, (64,), 0),
        "distilbert.embeddings.word_embeddings.weight": VOCAB,
        "vocab_projector.bias": VOCAB,
    }
    bloom = made("BloomForCausalLM", vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
    layer = "transformer.h.*."
    assert starred(bloom) == columns({f"{layer}self_attention.query_key_value": 96, f"{layer}mlp.dense_h_to_4h": 128}) | {
        f"{layer}self_attention.dense.weight": (1, (32,), 0),
        f"{layer}mlp.dense_4h_to_h.weight": (1, (128,), 0),
        "transformer.word_embeddings.weight": VOCAB,
    }


def test_t5_has_one_embedding_under_four_names():
    model = made("T5ForConditionalGeneration", vocab_size=96, d_model=32, num_layers=2, num_heads=4, d_ff=64, d_kv=8)
    attentions = [("encoder", 0, "SelfAttention"), ("decoder", 0, "SelfAttention"), ("decoder", 1, "EncDecAttention")]
    expected = {"shared.weight": VOCAB}
    for stack, layer, attention in attentions:
        at = f"{stack}.block.*.layer.{layer}.{attention}."
        expected |= {f"{at}{part}.weight": (0, (32,), 0) for part in "qkv"} | {f"{at}o.weight": (1, (32,), 0)}
    for stack, layer in (("encoder", 1), ("decoder", 2)):
        at = f"{stack}.block.*.layer.{layer}.DenseReluDense."
        expected |= {f"{at}wi.weight": (0, (64,), 0), f"{at}wo.weight": (1, (64,), 0)}
    found = {re.sub(r"block\.\d+", "block.*", name): (s.dim, s.blocks, s.padding) for name, s in splits(model).items()}
    assert found == expected


def test_phi3_is_cut_where_its_own_plan_gathers():
    model = made("Phi3ForCausalLM", **SMALL, num_key_value_heads=2)
    assert starred(model) == {
        "model.layers.*.self_attn.qkv_proj.weight": (0, (32, 16, 16), 0),
        "model.layers.*.self_attn.o_proj.weight": (1, (32,), 0),
        "model.layers.*.mlp.gate_up_proj.weight": (0, (64, 64), 0),
        "model.layers.*.mlp.down_proj.weight": (1, (64,), 0),
        "model.embed_tokens.weight": VOCAB,
        "lm_head.weight": VOCAB,
    }
    # queries, keys and values in one matrix cannot be cut and whole at once
    with pytest.raises(
        UserError, match=r"qkv_proj is of an attention with 2 key/value heads, and the degree has to divide that; degrees that work: 2$"
    ):
        splits(model, 4)


def test_gpt_neox_and_glm_by_their_own_plans():
    neox = starred(made("GPTNeoXForCausalLM", **SMALL))
    assert neox["gpt_neox.layers.*.attention.query_key_value.weight"] == (0, (96,), 0)  # head by head
    assert neox["embed_out.weight" if "embed_out.weight" in neox else "lm_head.weight"] == neox["gpt_neox.embed_in.weight"] == VOCAB
    glm = starred(made("GlmForCausalLM", **SMALL, num_key_value_heads=2, head_dim=8))
    assert glm["model.layers.*.mlp.gate_up_proj.weight"] == (0, (64, 64), 0) and glm["model.layers.*.self_attn.k_proj.weight"] == (0, (16,), 0)


def test_our_gpt_and_bert():
    third = (24, 24, 24)
    layer = {
        "blocks.*.attention.qkv.weight": (0, third, 0),
        "blocks.*.attention.qkv.bias": (0, third, 0),
        "blocks.*.attention.out.weight": (1, (24,), 0),
    }
    gpt = GPT(vocab=50257, layers=2, width=24, heads=6, seq_len=8)
    assert starred(gpt, 2) == layer | {
        "blocks.*.feed_forward.up.weight": (0, (96,), 0),
        "blocks.*.feed_forward.up.bias": (0, (96,), 0),
        "blocks.*.feed_forward.out.weight": (1, (96,), 0),
        "tokens.weight": (0, (50432,), 175),
    }
    bert = BERT(vocab=30522, layers=2, width=24, heads=6, seq_len=8)
    assert starred(bert, 2) == layer | {
        "blocks.*.feed_forward.0.weight": (0, (96,), 0),
        "blocks.*.feed_forward.0.bias": (0, (96,), 0),
        "blocks.*.feed_forward.2.weight": (1, (96,), 0),
        "tokens.weight": (0, (30522,), 0),
        "head.bias": (0, (30522,), 0),
    }


def test_what_the_sharding_says_besides():
    gpt = GPT(vocab=96, layers=1, width=24, heads=6, seq_len=8)
    found = sharding_of(gpt, Mesh(dp=2, tp=3), 4, sequence_parallel=True)
    assert (found.degree, found.rank, found.sequence) == (3, 1, True)  # rank 4 is (dp 1, tp 1)
    assert sharding_of(gpt, Mesh(dp=4), 3, {"nothing": "of this is read"}) is None


class Two(nn.Module):
    """A model of nobody's: two blocks that keep their layers by other names than anybody knows."""

    def __init__(self, tied=True):
        super().__init__()
        self.entry = nn.Embedding(30, 8)
        self.parts = nn.ModuleList(nn.ModuleDict({"wide": nn.Linear(8, 24), "narrow": nn.Linear(24, 8), "norm": nn.LayerNorm(8)}) for _ in range(2))
        self.exit = nn.Linear(8, 30, bias=False)
        self.gate = nn.Parameter(torch.zeros(4, 8))
        if tied:
            self.exit.weight = self.entry.weight


def test_a_plan_of_ones_own():
    plan = {"parts.*.wide": ("column", (16, 8)), "parts.*.narrow": "rowwise", "exit": "vocab", "gate": "row"}
    assert starred(Two(), 2, plan) == {
        "parts.*.wide.weight": (0, (16, 8), 0),
        "parts.*.wide.bias": (0, (16, 8), 0),
        "parts.*.narrow.weight": (1, (24,), 0),
        "entry.weight": (0, (30,), 0),
        "gate": (1, (8,), 0),
    }
    assert starred(Two(tied=False), 2, plan)["exit.weight"] == (0, (30,), 0) and "entry.weight" not in splits(Two(tied=False), 2, plan)
    # the last of several counts, lists are as good as tuples, and a column of a matrix that is named itself is its dim 0
    later = plan | {"parts.1.wide": "whole", "gate": ["colwise", 2]}
    assert {"parts.0.wide.weight", "gate"} <= splits(Two(), 2, later).keys() and "parts.1.wide.bias" not in splits(Two(), 2, later)
    assert splits(Two(), 2, later)["gate"] == Split(0, (2, 2))


def test_a_parameter_that_is_no_layers_is_named_itself():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32), 2, enable_nested_tensor=False)
    plan = {"self_attn.in_proj_*": ("column", 3), "self_attn.out_proj": "row", "linear1": "column", "linear2": "row"}
    assert starred(model, 2, plan) == {
        "layers.*.self_attn.in_proj_weight": (0, (16, 16, 16), 0),
        "layers.*.self_attn.in_proj_bias": (0, (16, 16, 16), 0),
        "layers.*.self_attn.out_proj.weight": (1, (16,), 0),
        "layers.*.linear1.weight": (0, (32,), 0),
        "layers.*.linear1.bias": (0, (32,), 0),
        "layers.*.linear2.weight": (1, (32,), 0),
    }
    with pytest.raises(UserError, match=r"layers.0.self_attn.in_proj_weight is of an attention with 4 heads, .* degrees that work: 2, 4$"):
        splits(model, 8, plan)


def test_the_callers_words_come_before_the_models_own():
    model = made("LlamaForCausalLM", **SMALL, num_key_value_heads=2)
    found = splits(model, 2, {"layers.*.self_attn": "whole", "lm_head": "whole"})
    assert not [name for name in found if "self_attn" in name or "lm_head" in name] and found["model.layers.1.mlp.up_proj.weight"] == Split(0, (64,))
    # heads that nobody cuts need not be divided: 4 heads, 8 ranks
    assert splits(model, 8, {"layers.*.self_attn": "whole"})["model.layers.0.mlp.down_proj.weight"] == Split(1, (64,))
    tied = made("LlamaForCausalLM", **SMALL, tie_word_embeddings=True)
    assert "model.embed_tokens.weight" not in splits(tied, 2, {"embed_tokens": "whole"})  # the head follows


def test_a_model_inside_another_has_its_plan():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = made("LlamaForCausalLM", **SMALL, num_key_value_heads=2)
            self.score = nn.Linear(96, 1)

    class Scored(Wrapped):
        tensor_plan = {"score": "row", "inner.lm_head": "whole"}  # noqa: RUF012

    ends = {"inner.model.embed_tokens.weight": VOCAB, "inner.lm_head.weight": VOCAB}
    assert starred(Wrapped()) == llama_layer("inner.model.") | ends
    assert starred(Scored()) == llama_layer("inner.model.") | {"inner.model.embed_tokens.weight": VOCAB, "score.weight": (1, (96,), 0)}


def test_a_whole_name_comes_before_an_end_of_one():
    model = nn.ModuleDict({"up": nn.Linear(4, 8), "block": nn.ModuleDict({"up": nn.Linear(4, 8)})})
    assert splits(model, 2, {"up": "column"}).keys() == {"up.weight", "up.bias"}
    assert splits(model, 2, {"*.up": "column"}).keys() == {"block.up.weight", "block.up.bias"}


REFUSED = [
    (6, None, "blocks.0.attention.qkv is of an attention with 4 heads, and the degree has to divide that; degrees that work: 2, 4"),
    (2, {"blocks.*.attn.qkv": "column"}, "tensor_plan['blocks.*.attn.qkv'] matches no module of GPT; near to it are blocks.*.attention.qkv"),
    (2, {"qqq": "row"}, "tensor_plan['qqq'] matches no module of GPT; modules that can be cut are blocks.*.attention.qkv, blocks.*.attention.out"),
    (2, {"norm": "column"}, "tensor_plan['norm'] = 'column': norm is a LayerNorm with a weight of [24], which has no weight that can be cut so"),
    (2, {"blocks.*.feed_forward": "row"}, "blocks.0.feed_forward is a FeedForward, which has no weight that can be cut so"),
    (2, {"positions": "column"}, "positions is an embedding, which is cut over its entries; say 'vocab', or 'whole'"),
    (
        2,
        {"tokens": "vocab", "head": "whole"},
        "tokens.weight and head.weight are one weight (tied), and the plan cuts it in two ways: tensor_plan['tokens']",
    ),
    (
        2,
        {"head": "column-wise"},
        "tensor_plan['head'] = 'column-wise' is no way to cut a module; did you mean 'colwise'?; expected 'column', 'row', ",
    ),
    (2, {"qkv": ("column", (20, 20))}, "has 72 elements, which are not made of blocks of [20, 20]; give sizes that add up to 72"),
    (2, {"qkv": ("column", 5)}, "has 72 elements, which are not made of 5 equal blocks"),
    (2, {3: "column"}, "a pattern is a string such as 'layers.*.mlp.up_proj', not 3"),
    (2, {"norm.weight": "row"}, "norm.weight of shape [24] has no dim that can be cut so; say column or whole"),
    (2, ["head"], "tensor_plan is a list, expected a dict of module-name patterns and styles"),
]


@pytest.mark.parametrize(("tp", "plan", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(tp, plan, message):
    with pytest.raises(UserError, match=re.escape(message)):
        splits(GPT(vocab=96, layers=2, width=24, heads=4, seq_len=8), tp, plan)


def test_key_value_heads_that_no_number_of_ranks_shares():
    model = made("LlamaForCausalLM", **SMALL | {"hidden_size": 160, "num_attention_heads": 20, "intermediate_size": 160}, num_key_value_heads=10)
    message = (
        "tp=4: model.layers.0.self_attn.k_proj is of an attention with 10 key/value heads, and the degree has to divide them or be a multiple of them"
    )
    with pytest.raises(UserError, match=re.escape(message) + "; degrees that work: 2, 5, 10, 20$"):
        splits(model, 4)
    assert "model.layers.0.self_attn.k_proj.weight" in splits(model, 10) and "model.layers.0.self_attn.k_proj.weight" not in splits(model, 20)


def test_inner_sizes_that_the_degree_does_not_divide():
    model = made("LlamaForCausalLM", **SMALL | {"intermediate_size": 66})
    with pytest.raises(
        UserError, match=r"tp=4: model.layers.0.mlp.gate_proj has 66 outputs, and the degree has to divide that; degrees that work: 2$"
    ):
        splits(model, 4)
    with pytest.raises(UserError, match=r"parts.0.wide has 15 outputs in a block, .* no degree above 1 works for all that the plan cuts"):
        splits(Two(), 4, {"wide": ("column", (15, 9)), "narrow": "row"} | {"gate": "column"})


def test_a_model_without_a_plan_is_told_how_to_write_one():
    message = (
        'tp=2: Two has no plan of which module is cut how, and none is known for it; give one, such as tensor_plan={"parts.*.wide": "column", '
        '"parts.*.narrow": "row"} (in a file: a table [mesh.tensor_plan]). Its linear layers, as inputs x outputs: parts.*.wide 8 x 24, '
        "parts.*.narrow 24 x 8, exit 8 x 30."
    )
    with pytest.raises(UserError, match=re.escape(message)):
        splits(Two())
    with pytest.raises(UserError, match=r"LSTM has no plan"):
        splits(LSTM(vocab=8, layers=1, width=8, dropout=0.0))
    with pytest.raises(UserError, match=r"nor has it linear layers"):
        splits(nn.LayerNorm(4))


def test_ways_of_cutting_that_are_not_known_can_be_said_otherwise():
    model = made("MixtralForCausalLM", **SMALL, num_key_value_heads=2, num_local_experts=2)
    with pytest.raises(UserError, match=r"this version knows no such way to cut model.layers.0.mlp.experts; say how in tensor_plan"):
        splits(model)
    expected = {key: value for key, value in llama_layer("model.").items() if "mlp" not in key}
    assert starred(model, 2, {"mlp.experts": "whole"}) == expected | {"model.embed_tokens.weight": VOCAB, "lm_head.weight": VOCAB}


def test_the_output_head_is_not_cut_by_rows():
    model = made("LlamaForCausalLM", **SMALL)
    with pytest.raises(UserError, match=r"lm_head is the output head, which is cut over the vocabulary; say 'vocab', or 'whole'"):
        splits(model, 2, {"lm_head": "row"})
    padded = made("LlamaForCausalLM", **SMALL | {"vocab_size": 97})
    assert splits(padded, 2, {"lm_head": "colwise_rep"})["lm_head.weight"] == Split(0, (256,), 159)


def test_sequences():
    with pytest.raises(UserError, match=r"sequence_parallel=True: the sequence is cut over the tp ranks, and the mesh has tp=1"):
        sharding_of(Two(), Mesh(dp=2), 0, sequence_parallel=True)


def test_the_page_about_plans_says_what_is_there():
    page = (Path(__file__).parents[2] / "docs" / "tensor.md").read_text()
    (file,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    mesh = config_from_dict(tomllib.loads(file)).mesh

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block()])

    found = splits(Model(), mesh.tp, mesh.tensor_plan, sequence_parallel=mesh.sequence_parallel)
    weights = {"qkv": Split(0, (8, 8, 8)), "up": Split(0, (16,)), "down": Split(1, (16,))}
    assert {name: found[f"blocks.0.{name}.weight"] for name in weights} == weights
    (families,) = re.findall(r"would gather what is fused: (.*?);", page, re.S)
    assert set(re.split(r",\s+", families)) == set(FAMILIES)
