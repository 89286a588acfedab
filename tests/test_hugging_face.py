"""Unmodified Hugging Face models from a config: loss and every parameter bit-equal to eager after three steps, memory as predicted."""

import copy

import pytest
import torch

import packhorse as ph

pytestmark = pytest.mark.cpu
transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


def models():
    t = transformers
    return {
        "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, n_positions=32)),
        "llama tied": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**SMALL)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8, vocab_size=100, decoder_start_token_id=0)
        ),
    }


@pytest.mark.parametrize("name", ["gpt2", "llama tied", "bert", "t5"])
def test_a_model_from_its_config(name):
    torch.manual_seed(0)
    model = models()[name]().train()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 100, (2, 12))
    batch = {"input_ids": ids, "labels": ids}
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    step = ph.compile(model, ph.plan(model, batch, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), clip_norm=1.0))
    torch.manual_seed(1)
    wanted = []
    for _ in range(3):
        theirs.zero_grad()
        loss = plain(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        theirs.step()
        wanted.append(loss.item())
    torch.manual_seed(1)
    assert [step(batch).item() for _ in range(3)] == wanted
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model.state_dict().values()))
    assert step.ledger().measured_peak_bytes == step.ledger().predicted_peak_bytes
