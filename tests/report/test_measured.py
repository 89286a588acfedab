import json

import pytest

from packhorse.report.measured import Measured, measured_of

pytestmark = pytest.mark.pure


def write(path, *records):
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_last_peak_and_the_median_step_but_for_the_first_two(tmp_path):
    steps = [{"kind": "step", "step": k + 1, "step_s": s, "memory_bytes": m} for k, (s, m) in enumerate([(9, None), (8, 5), (1, 6), (4, 7), (2, 7)])]
    write(tmp_path, *steps, {"kind": "eval", "step": 5, "loss": 1.0})
    assert measured_of(tmp_path) == Measured(5, 7, 2)
    write(tmp_path, *(step | {"host_bytes": 3 * step["step"], "sent_bytes": step["step"]} for step in steps[:3]), *steps[3:])
    assert measured_of(tmp_path) == Measured(5, 7, 2, host_bytes=9, sent_bytes=3)


def test_a_run_that_took_no_step_or_only_first_ones(tmp_path):
    assert measured_of(tmp_path) is None
    write(tmp_path, {"kind": "eval", "step": 0, "loss": 1.0})
    assert measured_of(tmp_path) is None
    write(tmp_path, {"kind": "step", "step": 1, "step_s": 3.0, "memory_bytes": 4})
    assert measured_of(tmp_path) == Measured(1, 4, None)
