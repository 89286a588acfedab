import pytest
import torch

from packhorse.data import load_corpus
from packhorse.train.build import build_model, build_optimizer, training_batch, validation_batches
from packhorse.train.config_file import config_from_dict

pytestmark = pytest.mark.cpu


def config(**sections):
    small = {"model": {"layers": 1, "width": 16, "heads": 2}, "data": {"seq_len": 8, "micro_batch_size": 2, "global_batch_size": 6}}
    return config_from_dict({**small, **sections})


def test_the_same_seed_gives_the_same_model():
    one, other, different = (build_model(config(run={"seed": seed})) for seed in (3, 3, 4))
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert not torch.equal(one.tokens.weight, different.tokens.weight)


def test_matrices_decay_and_every_parameter_is_in_one_group():
    model = build_model(config())
    decaying, other = build_optimizer(config(), model).param_groups
    assert {p.dim() for p in decaying["params"]} == {2} and decaying["weight_decay"] == 0.1 and decaying["betas"] == (0.9, 0.95)
    assert {p.dim() for p in other["params"]} == {1} and other["weight_decay"] == 0.0
    assert {id(p) for p in decaying["params"] + other["params"]} == {id(p) for p in model.parameters()}
    assert len(decaying["params"]) + len(other["params"]) == len(list(model.parameters()))


def test_sgd_is_torchs_with_its_flags():
    optimizer = build_optimizer(config(optimizer={"kind": "sgd", "momentum": 0.5, "fused": False, "lr": 0.25}), build_model(config()))
    assert type(optimizer) is torch.optim.SGD
    assert all(g["momentum"] == 0.5 and g["lr"] == 0.25 and g["fused"] is False for g in optimizer.param_groups)


def test_batches(texts):
    corpus = load_corpus(str(texts))
    micro_batches = training_batch(config(), corpus, 0)
    assert len(micro_batches) == 3
    assert all(m[name].shape == (2, 8) and m[name].dtype == torch.int64 for m in micro_batches for name in ("ids", "labels"))
    single = training_batch(config(data={"seq_len": 8, "micro_batch_size": 6, "global_batch_size": 6}), corpus, 0)
    assert torch.equal(single["labels"], torch.cat([m["labels"] for m in micro_batches]))
    validation = validation_batches(config(run={"eval_batches": 4}), corpus)
    assert len(validation) == 4 and validation[0]["ids"].shape == (2, 8)
