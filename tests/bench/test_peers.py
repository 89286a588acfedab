import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from packhorse.bench import heap_watch, peers
from packhorse.bench.heap_watch import HeapWatch
from packhorse.bench.jobs import JobError, run_job
from packhorse.bench.peer_job import batch_of, batch_of_all
from packhorse.bench.peer_systems import ADAMW, CLIP_NORM, SYSTEMS
from packhorse.bench.peer_tensor import HeadsOfARank, in_order_of_ranks
from packhorse.bench.peers import Row, bars_of, medians, render, unlike
from packhorse.cli.benches import NAMES, run_bench
from packhorse.errors import UserError
from packhorse.models.gpt import GPT, Attention

pytestmark = pytest.mark.cpu
MIB = 2**20
SHAPE = {"layers": 1, "heads": 2, "width": 8, "vocab": 16, "seq_len": 6, "batch": 2, "share": "99%"}


def row(system, cpu=1.0, heap=100.0, rss=110.0, losses=(3.0, 2.0)):
    return Row(system, "narrow", 2, 1, 1.0, cpu, heap * MIB, 50.0 * MIB, rss * MIB, losses)


# -- what packhorse is held to -------------------------------------------------------------------------------------------------------


def test_bars_are_beside_the_best_of_the_stage():
    rows = [
        row("DDP", 1.0, 10), row("DDP + ZeroRedundancyOptimizer", 2.0, 200), row("FSDP1 FULL_SHARD", 4.0, 100), row("FSDP2", 5.0, 80),
        row("FSDP2, every block checkpointed", 6.0, 60), row("packhorse 0", 1.0, 100, 120), row("packhorse 1", 1.9, 180),
        row("packhorse 3", 3.5, 60), row("packhorse 3, recomputing", 6.0, 45),
    ]  # fmt: skip
    found = {(bar.row.system, bar.what): bar for bar in bars_of(rows)}
    expected = {
        ("packhorse 0", "RSS"): (1.2, 1.15, "its own heap peak"),
        ("packhorse 1", "CPU"): (0.95, 0.95, "DDP + ZeroRedundancyOptimizer"),
        ("packhorse 1", "heap peak"): (0.9, 0.85, "DDP + ZeroRedundancyOptimizer"),
        ("packhorse 3", "CPU"): (0.875, 0.85, "FSDP1 FULL_SHARD"),
        ("packhorse 3", "heap peak"): (0.75, 0.85, "FSDP2"),
        ("packhorse 3, recomputing", "heap peak"): (0.75, 0.8, "FSDP2, every block checkpointed"),
    }
    for key, (share, most, beside) in expected.items():
        bar = found[key]
        assert (bar.found, bar.most, bar.beside) == (pytest.approx(share), most, beside), key
        assert bar.met == (share <= most)
    assert ("packhorse 0", "CPU") not in found


def test_bars_of_tensor_parallelism_are_beside_each_rival():
    """CPU beside both, the heap beside the leaner; those that are sequence parallel or recompute among themselves; ZeRO does not come in."""
    rows = [
        row("FSDP2", 0.1, 1), row("DTensor", 2.0, 80), row("Megatron-core", 1.0, 100), row("DTensor, sequence parallel", 4.0, 50),
        row("Megatron-core, every block checkpointed", 5.0, 40), row("packhorse tp", 1.0, 60, 120), row("packhorse tp, sequence parallel", 3.0, 45),
        row("packhorse tp, recomputing", 4.0, 30),
    ]  # fmt: skip
    assert [(bar.row.system, bar.what, bar.beside, pytest.approx(bar.found), bar.most, bar.met) for bar in bars_of(rows)] == [
        ("packhorse tp", "CPU", "DTensor", 0.5, 0.85, True),
        ("packhorse tp", "CPU", "Megatron-core", 1.0, 0.95, False),
        ("packhorse tp", "heap peak", "DTensor", 0.75, 0.85, True),
        ("packhorse tp, sequence parallel", "CPU", "DTensor, sequence parallel", 0.75, 0.85, True),
        ("packhorse tp, sequence parallel", "heap peak", "DTensor, sequence parallel", 0.9, 0.85, False),
        ("packhorse tp, recomputing", "CPU", "Megatron-core, every block checkpointed", 0.8, 0.95, True),
        ("packhorse tp, recomputing", "heap peak", "Megatron-core, every block checkpointed", 0.75, 0.85, True),
    ]
    text = render([row("DTensor"), row("packhorse tp"), row("packhorse tp, recomputing", losses=(3.0, 2.1))])
    assert "### narrow: 2 x 128 tokens, on each of 2 ranks" in text and "| DTensor | 1 | 1000 | 1000 | 100 | 50 | 110 | 2.00000 |" in text
    assert "- packhorse tp, recomputing: its losses are not those of the others" in text


def test_rows_are_medians_of_the_runs_that_came_to_an_end():
    runs = [{"wall": w, "cpu": 1, "heap_peak": 1, "heap_idle": 1, "rss_peak": 1, "losses": [1.0]} for w in (5, 1, 2)]
    found = medians(SYSTEMS[0], "wide", 2, [*runs, {"failure": "gone"}])
    assert (found.wall, found.runs, found.failure) == (2, 3, "gone")
    assert medians(SYSTEMS[0], "wide", 2, [{"failure": "gone"}]).runs == 0


def test_other_losses_are_seen():
    rows = [row("DDP"), row("FSDP2"), row("packhorse 3", losses=(3.0, 2.0002)), row("alone, no communication", losses=(3.0, 5.0))]
    assert [r.system for r in unlike(rows)] == ["packhorse 3"]
    text = render([*rows, replace(row("packhorse 1"), runs=0, failure="it was killed")])
    assert "- packhorse 3: its losses are not those of the others" in text and "- packhorse 1: it was killed" in text
    assert "| packhorse 1 | 1 | failed |" in text and "### narrow: 1 x 128 tokens a rank, 2 ranks" in text


def test_the_command(monkeypatch, tmp_path, capsys):
    asked = []

    def instead(module, given, num_ranks, *, seconds, environment, python):
        asked.append((given["system"], given["shape"]["seq_len"], num_ranks))
        assert environment["LD_PRELOAD"].endswith("heap_watch.so") and python == sys.executable
        if given["system"] == "DDP":
            raise JobError("it was killed")
        return {"wall": 1.0, "cpu": 1.0, "heap_peak": 100 * MIB, "heap_idle": 90 * MIB, "rss_peak": 200 * MIB, "losses": [2.0, 1.0]}

    monkeypatch.setattr(peers, "run_job", instead)
    page = tmp_path / "page.md"
    page.write_text(f"{peers.BEGIN}\n{peers.END}\n")
    words = ["ddp", "packhorse 1", "--ranks", "2", "--shapes", "narrow", "--rounds", "2", "--write", str(page)]
    assert run_bench("peers", words, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert {r["system"]: r["runs"] for r in found["rows"]} == {"DDP": 0, "DDP + ZeroRedundancyOptimizer": 2, "packhorse 1": 2}
    assert [(b["what"], b["found"], b["met"]) for b in found["bars"]] == [("CPU", 1.0, False), ("heap peak", 1.0, False), ("RSS", 2.0, False)]
    assert len(asked) == 6 and set(asked[:3]) == set(asked[3:]) and {a[1:] for a in asked} == {(128, 2)}
    assert "| packhorse 1 | RSS | 2.000 | 1.15 | its own heap peak | missed |" in page.read_text()


def test_the_command_beside_tensor_parallelism(monkeypatch, tmp_path, capsys):
    asked = {}

    def instead(module, given, num_ranks, *, seconds, environment, python):
        asked[given["system"]] = (num_ranks, python, "PYTHONPATH" in environment)
        return {"wall": 1.0, "cpu": 1.0, "heap_peak": MIB, "heap_idle": MIB, "rss_peak": MIB, "losses": [1.0]}

    monkeypatch.setattr(peers, "run_job", instead)
    page = tmp_path / "page.md"
    page.write_text(f"{peers.BEGIN}\n{peers.END}\n{peers.TENSOR_BEGIN}\n{peers.TENSOR_END}\n")
    words = ["--tensor", "dtensor", "core", "tp", "--rounds", "1", "--shapes", "wide", "--megatron", "/bin/true", "--write", str(page)]
    run_bench("peers", words, as_json=True)
    here = (2, sys.executable, False)
    assert asked == {
        "DTensor": here, "DTensor, sequence parallel": here, "DTensor, every block checkpointed": here, "packhorse tp": here,
        "packhorse tp, sequence parallel": here, "packhorse tp, in a budget": here,
        "packhorse tp, dropping what is cheap": here, "packhorse tp, recomputing": here,
        "Megatron-core": (2, "/bin/true", True),
        "Megatron-core, every block checkpointed": (2, "/bin/true", True),
    }  # fmt: skip
    assert page.read_text().startswith(f"{peers.BEGIN}\n{peers.END}\n{peers.TENSOR_BEGIN}\n### wide: 4 x 256 tokens, on each of 2 ranks\n")


@pytest.mark.parametrize(
    "words, said",
    [
        (["horovod"], "no system is called horovod; the systems are alone"),
        (["deepspeed"], "no system is called deepspeed"),
        (["--ranks", "1"], "2 or more ranks"),
        (["--device", "nowhere.toml"], "cannot read the device file nowhere.toml"),
        (["--deepspeed", "/no/python"], "--deepspeed /no/python: expected the path of a Python interpreter"),
        (["--tensor", "megatron"], "no system is called megatron; the systems are DTensor"),
        (["--tensor", "--megatron", "/no/python"], "--megatron /no/python: expected the path of a Python interpreter"),
    ],
)
def test_what_cannot_be_asked(words, said):
    assert "peers" in NAMES
    with pytest.raises(UserError, match=said):
        run_bench("peers", words, as_json=False)


# -- the watch -----------------------------------------------------------------------------------------------------------------------

WATCHED = """
import json, mmap
from packhorse.bench.heap_watch import HeapWatch
watch = HeapWatch()
def seen():
    found = watch.seen()
    return [found.heap_peak / 2**20, found.heap_idle / 2**20]
block = bytearray(40 << 20)
rows = [seen()]
mapped = mmap.mmap(-1, 64 << 20)
mapped[: 16 << 20] = bytes(16 << 20)
rows.append(seen())
del block
watch.reset()
rows.append(seen())
mapped.close()
rows.append(seen())
print(json.dumps(rows))
"""


def test_the_watch_counts_what_is_touched(tmp_path):
    """40 MiB of malloc; of a mapping of 64 MiB the 16 that were written, from a copy of as many; a new peak after the reset; all given back."""
    library = heap_watch.build(tmp_path)
    environment = os.environ | {"LD_PRELOAD": str(library)}
    said = subprocess.run([sys.executable, "-c", WATCHED], env=environment, capture_output=True, text=True, check=True).stdout
    malloc, mapped, reset, closed = json.loads(said)
    assert malloc == pytest.approx([40, 40], abs=0.5)
    assert mapped == pytest.approx([40 + 16 + 16, 40 + 16], abs=0.5)
    assert reset == pytest.approx([16, 16], abs=0.5)
    assert closed == pytest.approx([64, 0], abs=0.5)  # what was not touched of a mapping that is gone nobody knows


def test_a_process_that_is_not_watched():
    with pytest.raises(UserError, match="LD_PRELOAD"):
        HeapWatch()


def test_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no C compiler"):
        heap_watch.build(tmp_path)


# -- jobs ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", ["packhorse 3", "DTensor, sequence parallel"])
def test_a_job_beside_plain_pytorch(system, tmp_path):
    """Two ranks with halves of the batch, or of the matrices, against one with all of it."""
    asked = {"system": system, "shape": SHAPE, "warmup": 1, "steps": 2, "budget": "minimum", "device": None}
    found = run_job("packhorse.bench.peer_job", asked, 2, seconds=200, environment={"LD_PRELOAD": str(heap_watch.build(tmp_path))})
    torch.manual_seed(0)
    model = GPT(**{key: size for key, size in SHAPE.items() if key not in ("batch", "share")})
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for number, loss in enumerate(found["losses"]):
        optimizer.zero_grad()
        parts = [batch_of(SHAPE, number, rank) for rank in (0, 1)]
        value = model(**{key: torch.cat([part[key] for part in parts]) for key in parts[0]})
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        assert loss == pytest.approx(value.item(), abs=1e-5)
    assert len(found["losses"]) == 3 and -MIB < found["heap_idle"] <= found["heap_peak"] < 64 * MIB and found["cpu"] > 0


def test_all_ranks_see_what_each_sees_without():
    whole = batch_of_all(SHAPE, 3, 2)
    assert all(torch.equal(whole[key][2:], batch_of(SHAPE, 3, 1)[key]) and len(whole[key]) == 4 for key in ("ids", "labels"))


def test_attention_of_a_rank_is_the_whole_with_its_heads():
    """What the heads of both ranks give, side by side, is what all heads give: `out` passes it on."""
    torch.manual_seed(0)
    whole, x = Attention(12, 4, 0.0).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    whole.out = torch.nn.Identity()
    mixed, parts = whole(x), []
    weight, bias = (in_order_of_ranks(p.data, 2).chunk(2) for p in (whole.qkv.weight, whole.qkv.bias))
    for rank in (0, 1):
        part = HeadsOfARank(whole, 2)
        part.qkv = torch.nn.Linear(12, 18, dtype=torch.float64)
        part.qkv.weight.data, part.qkv.bias.data = weight[rank], bias[rank]
        parts.append(part(x))
    assert torch.allclose(torch.cat(parts, -1), mixed, rtol=0, atol=1e-14)


def test_a_job_that_fails_says_why():
    with pytest.raises(JobError, match=r"No module named packhorse\.no_such_module"):
        run_job("packhorse.no_such_module", {}, 2, seconds=100)
