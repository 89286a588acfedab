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
from packhorse.bench.peer_job import batch_of
from packhorse.bench.peer_systems import ADAMW, CLIP_NORM, SYSTEMS
from packhorse.bench.peers import Row, bars_of, medians, render, unlike
from packhorse.cli.benches import NAMES, run_bench
from packhorse.errors import UserError
from packhorse.models.gpt import GPT

pytestmark = pytest.mark.cpu
MIB = 2**20
SHAPE = {"layers": 1, "heads": 2, "width": 8, "vocab": 16, "seq_len": 5, "batch": 2}


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


@pytest.mark.parametrize(
    "words, said",
    [
        (["horovod"], "no system is called horovod; the systems are alone"),
        (["deepspeed"], "no system is called deepspeed"),
        (["--ranks", "1"], "2 or more ranks"),
        (["--deepspeed", "/no/python"], "expected the path of a Python interpreter"),
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


def test_a_job_of_packhorse_beside_plain_pytorch(tmp_path):
    """Two ranks with halves of the batch, against one with all of it."""
    asked = {"system": "packhorse 3", "shape": SHAPE, "warmup": 1, "steps": 2, "budget": "minimum"}
    found = run_job("packhorse.bench.peer_job", asked, 2, seconds=200, environment={"LD_PRELOAD": str(heap_watch.build(tmp_path))})
    torch.manual_seed(0)
    model = GPT(**{key: size for key, size in SHAPE.items() if key != "batch"})
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for number, loss in enumerate(found["losses"]):
        optimizer.zero_grad()
        parts = [batch_of(SHAPE, number, rank) for rank in (0, 1)]
        value = model(**{key: torch.cat([part[key] for part in parts]) for key in parts[0]})
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        assert loss == pytest.approx(value.item(), abs=1e-5)
    assert len(found["losses"]) == 3 and 0 < found["heap_idle"] <= found["heap_peak"] < 64 * MIB and found["cpu"] > 0


def test_a_job_that_fails_says_why():
    with pytest.raises(JobError, match=r"No module named packhorse\.no_such_module"):
        run_job("packhorse.no_such_module", {}, 2, seconds=100)
