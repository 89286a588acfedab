"""packhorse's own GPT as the GPT-2 of Hugging Face: the same function of the same weights, whose matrices lie transposed there."""

import torch
from torch import nn

from packhorse.models.gpt import GPT


def as_gpt2(model: GPT, *, dropout: float) -> nn.Module:
    """The GPT2LMHeadModel with the weights of `model`, on the CPU, in training mode.

    Logits agree to rounding: the sums are the same, and a transposed matrix product may take them in another order.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=model.tokens.num_embeddings,
        n_positions=model.positions.num_embeddings,
        n_embd=model.tokens.embedding_dim,
        n_layer=len(model.blocks),
        n_head=model.blocks[0].attention.heads,  # type: ignore[union-attr, arg-type]
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )
    made = GPT2LMHeadModel(config).train()
    ours = model.state_dict()
    theirs = {
        "transformer.wte.weight": ours["tokens.weight"],
        "transformer.wpe.weight": ours["positions.weight"],
        "transformer.ln_f.weight": ours["norm.weight"],
        "transformer.ln_f.bias": ours["norm.bias"],
        "lm_head.weight": ours["tokens.weight"],
    }
    names = {
        "norm_attention": "ln_1",
        "norm_feed_forward": "ln_2",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.out": "mlp.c_proj",
    }
    for block in range(len(model.blocks)):
        for our, their in names.items():
            weight = ours[f"blocks.{block}.{our}.weight"]
            theirs[f"transformer.h.{block}.{their}.weight"] = weight.t() if weight.dim() == 2 else weight
            theirs[f"transformer.h.{block}.{their}.bias"] = ours[f"blocks.{block}.{our}.bias"]
    with torch.no_grad():
        made.load_state_dict(theirs)
    return made
