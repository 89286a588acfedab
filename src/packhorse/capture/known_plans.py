"""Tensor plans of Hugging Face families that come without one, or whose own gathers what is fused. No torch.

model_type -> module-name pattern -> style, as in the plans that users write. The output head need not be named: it is cut over the vocabulary.
"""

from typing import Any

_BERT = {
    "embeddings.word_embeddings": "vocab",
    "encoder.layer.*.attention.self.query": "column",
    "encoder.layer.*.attention.self.key": "column",
    "encoder.layer.*.attention.self.value": "column",
    "encoder.layer.*.attention.output.dense": "row",
    "encoder.layer.*.intermediate.dense": "column",
    "encoder.layer.*.output.dense": "row",
}
_T5 = {
    "shared": "vocab",
    **{f"block.*.layer.*.{attention}.{part}": "column" for attention in ("SelfAttention", "EncDecAttention") for part in "qkv"},
    **{f"block.*.layer.*.{attention}.o": "row" for attention in ("SelfAttention", "EncDecAttention")},
    **{f"block.*.layer.*.DenseReluDense.{part}": "column" for part in ("wi", "wi_0", "wi_1")},
    "block.*.layer.*.DenseReluDense.wo": "row",
}
_GATE_UP = {"layers.*.mlp.gate_up_proj": ("column", 2)}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "bloom": {
        "word_embeddings": "vocab",
        "h.*.self_attention.query_key_value": "column",  # head by head: query, key and value of one head lie together
        "h.*.self_attention.dense": "row",
        "h.*.mlp.dense_h_to_4h": "column",
        "h.*.mlp.dense_4h_to_h": "row",
    },
    "camembert": _BERT,
    "distilbert": {
        "embeddings.word_embeddings": "vocab",
        **{f"layer.*.attention.{part}_lin": "column" for part in "qkv"},
        "layer.*.attention.out_lin": "row",
        "layer.*.ffn.lin1": "column",
        "layer.*.ffn.lin2": "row",
    },
    "electra": _BERT,
    "glm": _GATE_UP,
    "glm4": _GATE_UP,
    "gpt2": {
        "wte": "vocab",
        "h.*.attn.c_attn": ("column", 3),
        "h.*.attn.c_proj": "row",
        "h.*.mlp.c_fc": "column",
        "h.*.mlp.c_proj": "row",
    },
    "gpt_neo": {
        "wte": "vocab",
        **{f"h.*.attn.attention.{part}_proj": "column" for part in "qkv"},
        "h.*.attn.attention.out_proj": "row",
        "h.*.mlp.c_fc": "column",
        "h.*.mlp.c_proj": "row",
    },
    "mt5": _T5,
    "opt": {
        "embed_tokens": "vocab",
        **{f"layers.*.self_attn.{part}_proj": "column" for part in "qkv"},
        "layers.*.self_attn.out_proj": "row",
        "layers.*.fc1": "column",
        "layers.*.fc2": "row",
    },
    "phi3": _GATE_UP,
    "roberta": _BERT,
    "t5": _T5,
    "xlm-roberta": _BERT,
}


def known_plan(config: Any) -> dict[str, Any]:
    """The plan of a Hugging Face configuration's family; empty where it has none here."""
    kind = getattr(config, "model_type", None)
    found = dict(FAMILIES.get(kind, {})) if isinstance(kind, str) else {}
    if kind == "phi3":
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
        found["layers.*.self_attn.qkv_proj"] = ("column", (queries, keys, keys))
    return found
