"""A plan on meta is the plan of the run."""

import pytest

import packhorse
from packhorse.train.build import build_model, build_optimizer, build_plan
from packhorse.train.config_file import config_from_dict

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_model_without_memory_is_planned_alike(kind):
    config = config_from_dict(
        {
            "model": {"layers": 1, "width": 16, "heads": 2},
            "data": {"seq_len": 8, "micro_batch_size": 2, "global_batch_size": 4},
            "optimizer": {"kind": kind, "clip_norm": 1.0},
        }
    )
    plans = []
    for device in ("cpu", "meta"):
        model = build_model(config, device)
        optimizer = build_optimizer(config, model)
        assert [group["fused"] for group in optimizer.param_groups] == [config.optimizer.fused] * 2
        plans.append(build_plan(config, packhorse, model, optimizer).to_dict())
    assert plans[0] == plans[1]
