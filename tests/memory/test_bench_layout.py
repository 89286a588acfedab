import pytest

from packhorse.bench.layout import measure, render, step_like
from packhorse.errors import UserError
from packhorse.memory.bounds import lower_bound
from packhorse.memory.buffers import Buffer
from packhorse.memory.instances import write_csv

pytestmark = pytest.mark.pure


def test_rows_and_table(tmp_path):
    # Two that never meet, of 8 and 4 bytes, and one of 4 alive with both: 12 bytes at most alive, and a stack of 12 is a layout.
    buffers = [Buffer("a", 0, 2, 8), Buffer("b", 2, 4, 4), Buffer("c", 0, 4, 4)]
    write_csv(tmp_path / "fits.12.csv", buffers)
    write_csv(tmp_path / "tight.11.csv", buffers)
    write_csv(tmp_path / "unnamed.csv", buffers)
    rows = measure(tmp_path, time_limit_s=5, num_workers=1)
    assert [row["name"] for row in rows] == ["fits", "tight", "unnamed", "step"]
    for row in rows[:3]:
        assert (row["num_buffers"], row["lower_bound"], row["greedy_height"], row["height"], row["ratio"]) == (3, 12, 12, 12, 1.0)
    assert [(row["capacity"], row["fits"]) for row in rows] == [(12, True), (11, False), (None, None), (None, None)]
    assert rows[3]["num_buffers"] == 5000 and rows[3]["ratio"] == 1.0
    lines = render(rows).splitlines()
    assert len(lines) == 5
    assert lines[1].split()[:8] == ["fits", "3", "12", "12", "12", "1.0000", "12", "yes"]
    assert lines[2].split()[6:8] == ["11", "no"]
    assert lines[4].split()[1] == "5,000"
    assert lines[4].split()[6:8] == ["-", "-"]


def test_without_a_folder_only_the_step():
    assert [row["name"] for row in measure(None, time_limit_s=5, num_workers=1)] == ["step"]


def test_an_empty_folder(tmp_path):
    with pytest.raises(UserError, match=r"\.csv"):
        measure(tmp_path, 1, 1)
    with pytest.raises(UserError, match="absent"):
        measure(tmp_path / "absent", 1, 1)


@pytest.mark.parametrize("num_blocks, seed", [(1, 0), (3, 1), (7, 2)])
def test_step_like_can_be_laid_out_in_its_lower_bound(num_blocks, seed):
    buffers = step_like(num_blocks, seed)
    assert len(buffers) == 50 * num_blocks
    saved = [b for b in buffers if ".saved" in b.name]
    short = [b for b in buffers if ".saved" not in b.name]
    loss = [b for b in short if b.name.startswith("loss")]
    assert len(saved) == 8 * num_blocks and len(loss) == 2
    # The layout that step_like promises: two slots for what is short-lived, never both taken twice.
    assert all(b.size <= loss[0].size for b in short)
    for t in range(max(b.upper for b in buffers)):
        assert sum(b.lower <= t < b.upper for b in short) <= 2
    assert lower_bound(buffers, 64) == sum(b.size for b in saved) + 2 * loss[0].size
    assert all(b.size % 64 == 0 for b in buffers)
