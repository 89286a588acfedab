"""Every rank plans for itself, and all decide alike."""

from dataclasses import replace

import pytest
import torch

import packhorse
from packhorse.models.gpt import GPT
from packhorse.planning.persistent import seen_by

pytestmark = pytest.mark.cpu


def planned(dp, rank, stage, **options):
    torch.manual_seed(0)
    model = GPT(vocab=97, layers=2, width=20, heads=2, seq_len=8)
    batch = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters())  # works on whole tensors: ranks need scratch for what lies in their shards
    return packhorse.plan(model, batch, optimizer=optimizer, clip_norm=1.0, mesh=packhorse.Mesh(dp=dp), rank=rank, zero_stage=stage, **options)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_another_rank_holds_is_what_it_plans_itself(stage):
    plans = [planned(3, rank, stage) for rank in range(3)]
    for rank in range(3):
        assert seen_by(plans[0].persistent, rank) == plans[rank].persistent
        assert seen_by(plans[rank].persistent, 0) == plans[0].persistent
        assert plans[0].zero.seen_by(rank) == plans[rank].zero


def test_ranks_decide_by_the_same_bytes():
    plans = [planned(3, rank, 3, recompute="sqrt", budget="minimum") for rank in range(3)]
    assert len({plan.needed for plan in plans}) == 1
    assert plans[0].needed.arena_bytes == max(plans[0].arena_bytes, plans[2].arena_bytes)
    recomputed = [[node.module for node in plan.programs["first"].graph.nodes if node.phase == "recompute"] for plan in plans]
    assert recomputed[0] == recomputed[1] == recomputed[2] != []


def test_the_first_and_the_last_rank_decide():
    part = planned(3, 1, 1).zero.partition
    assert [replace(part, num_ranks=count).judges for count in (2, 3, 1024)] == [(0, 1), (0, 2), (0, 1023)]
