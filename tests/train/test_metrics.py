import errno

import pytest

from packhorse.errors import UserError
from packhorse.train.metrics import MetricsFile, read_metrics

pytestmark = pytest.mark.pure


def record(step, kind="step"):
    return {"kind": kind, "step": step, "loss": 0.1 + step}


def test_opening_drops_what_will_be_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, 0) as metrics:
        for step in (1, 2, 3):
            metrics.append(record(step))
        metrics.append(record(3, "eval"))
        metrics.append(record(3, "end"))
    with MetricsFile(path, 3) as metrics:
        assert read_metrics(path) == [record(1), record(2), record(3), record(3, "eval")]
    with MetricsFile(path, 2) as metrics:
        metrics.append(record(3))
    assert read_metrics(path) == [record(1), record(2), record(3)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_that_a_kill_cut_short_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "step": 1, "loss": 1.1}\n[1]\n{"kind": "st\xff')
    assert read_metrics(path) == [record(1)]
    assert read_metrics(tmp_path / "none") == []


def test_a_full_disk_is_one_paragraph(tmp_path):
    metrics = MetricsFile(tmp_path / "metrics.jsonl", 0)

    class Full:
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    metrics._file.close()
    metrics._file = Full()
    with pytest.raises(UserError, match=r"metrics\.jsonl: No space left on device"):
        metrics.append(record(1))
    with pytest.raises(UserError, match="cannot write"):
        MetricsFile(tmp_path / "none" / "metrics.jsonl", 0)
