"""ZeRO-R at small sizes: what is saved and sent by hand, claims that can fail, two ranks for real."""

from dataclasses import asdict, replace

import pytest

from packhorse.bench.jobs import run_job
from packhorse.mesh import Mesh
from packhorse.models.sizes import Size
from packhorse.reproduce import zero, zero_residual
from packhorse.reproduce.zero_residual import CONFIGS, Block, Config, Large, States, formula, most_padding
from packhorse.reproduce.zero_residual_job import Ran, Saved, elements_of, planned, saved_of

pytestmark = pytest.mark.cpu


def test_what_is_saved_by_hand():
    """The input of each of 3 blocks, 3 x 18 tokens of 36 channels in float32, and one number for the loss; 4 ranks."""
    model, batch = zero_residual._on_meta(Size(3, 36, 4, 128, 18), 3)
    kept, cut, away = (saved_of(planned(model, batch, Config("", "", 0, residency), Mesh(tp=4), 0), 4) for residency in ("keep", "shard", "offload"))
    inputs = 3 * (3 * 18) * 36 * 4
    assert kept == Saved(0, 0, 0, inputs + 4, inputs + 4, 0)
    assert cut == Saved(inputs, inputs // 4, 0, 4, inputs // 4 + 4, 0)
    assert away == Saved(inputs, inputs // 4, 0, 4, 0, inputs // 4 + 4)


def test_elements_are_those_of_a_rank():
    """12 h^2 + 13 h of a block, of which 12 h^2 + 7 h are cut in two (biases of qkv and up, too); 64 of 128
    tokens; 16 positions; a norm."""
    h = 16
    model, batch = zero_residual._on_meta(Size(2, h, 4, 128, 16), 1)
    plan = planned(model, batch, CONFIGS[4], Mesh(dp=2, tp=2), 0)
    assert elements_of(plan) == 2 * ((12 * h * h + 7 * h) // 2 + 6 * h) + 64 * h + 16 * h + 2 * h


def test_traffic_by_hand(monkeypatch):
    monkeypatch.setattr(zero_residual, "TRAFFIC", ((32, 4),))
    (block,) = zero_residual.traffic()
    message = zero_residual.SAMPLES * zero_residual.SHAPE["seq_len"] * 32 * 4
    assert block == Block(32, 4, message, 5, 5 * 2 * message * 3 // 4, 1, message * 3 // 4)
    assert block.more == 1 / 10 and block.more_as_printed == pytest.approx(1 / 12)


def test_formula():
    """Section 5, with N = 2."""
    assert [formula(1000, stage, "fp16") for stage in (1, 2)] == [4000 + 6000, 2000 + 7000]
    assert [formula(1000, stage, "fp32") for stage in (1, 2)] == [8000 + 4000, 4000 + 6000]


def good():
    """Everything as the paper has it."""
    elements = 100_000
    kept, cut, away = Saved(0, 0, 0, 1004, 1004, 0), Saved(1000, 500, 0, 4, 504, 0), Saved(1000, 500, 0, 4, 0, 504)
    found = {}
    for config in CONFIGS:
        saved = {"keep": kept, "shard": cut, "offload": away}[config.residency]
        persistent = {"parameters": int(formula(elements, config.stage, "fp32")), "metrics": 12, "padding": 64}
        found[config.name] = [Ran("bits", True, [1.0], 1, 1, 1, persistent, elements, saved)] * 4
    mixed = [States(c.name, "fp16", elements, formula(elements, c.stage, "fp16"), int(formula(elements, c.stage, "fp16")) + 64) for c in CONFIGS]
    return found, mixed, [Block(64, 4, 4000, 5, 30_000, 1, 3000)], Large(125, 3200, 200)


def broken(found, mixed, blocks, of_large):
    return [claim.what for claim in zero_residual.claims(found, mixed, blocks, of_large) if claim.holds is False]


def test_claims_hold_and_fail():
    found, mixed, blocks, of_large = good()
    assert not broken(found, mixed, blocks, of_large)

    def other(name, **fields):
        return found | {name: [*found[name][:-1], replace(found[name][-1], **fields)]}

    assert broken(other("C5", bits="others"), mixed, blocks, of_large) == ["C1 to C5: losses and gradients"]
    assert broken(other("C3", exact=False), mixed, blocks, of_large) == ["peak, bytes on the host, bytes sent"]
    for name, saved in (("C2", Saved(1000, 501, 0, 4, 505, 0)), ("C4", Saved(1000, 500, 0, 0, 500, 0)), ("C5", Saved(1000, 500, 0, 4, 4, 500))):
        (what,) = broken(other(name, saved=saved), mixed, blocks, of_large)[:1]
        assert what.startswith(name)
    heavy = replace(mixed[2], num_bytes=int(mixed[2].formula) + most_padding(zero_residual.SHAPE["layers"]) + 1)
    assert broken(found, [*mixed[:2], heavy, *mixed[3:]], blocks, of_large) == ["model states of a rank, fp16, planned"]
    six = replace(blocks[0], sums=6, sums_bytes=36_000)
    assert len(broken(found, mixed, [six], of_large)) == 2  # 5 and 1; a tenth
    assert len(broken(found, mixed, [replace(blocks[0], gathers_bytes=3001)], of_large)) == 3
    assert len(broken(found, mixed, blocks, replace(of_large, slices_a_block=201))) == 1


def test_table_and_figures():
    found = good()
    text = zero_residual.table(*found)
    assert "| C5 | P_os+g, C_B + M_D + P_a+cpu |" in text and "all blocks 400,000 and 25,000" in text
    assert set(zero_residual.figures(*found)) == {"runs", "mixed", "blocks", "large"}
    assert "residual" in zero.PARTS


def test_two_ranks_for_real():
    """Without dp ranks: kept, cut, on the host."""
    asked = {"shape": {"layers": 1, "width": 36, "heads": 4, "seq_len": 9}, "vocab": 64, "samples": 1, "dp": 1, "tp": 2, "steps": 2}
    found = run_job(zero_residual.JOB, asked | {"configs": [asdict(c) for c in (CONFIGS[0], CONFIGS[1], CONFIGS[4])]}, 2, seconds=300)
    rans = [[Ran(**row | {"saved": Saved(**row["saved"])}) for row in rows] for rows in found]
    assert all(ran.exact for rows in rans for ran in rows) and len({ran.bits for rows in rans for ran in rows}) == 1
    kept, cut, away = (rows[0].saved for rows in rans)
    assert kept.cut == 0 < cut.cut and cut.slices * 2 == cut.cut + cut.padding and away.device == 0 == cut.host
    assert away.host == away.slices + away.uncut == cut.slices + cut.uncut
    assert rans[0][0].sent_bytes < rans[1][0].sent_bytes == rans[2][0].sent_bytes
