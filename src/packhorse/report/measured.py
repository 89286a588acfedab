"""What was measured in a run, for the page of its plan. No torch."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from packhorse.train.meter import NUM_WARMUP_STEPS
from packhorse.train.metrics import read_metrics


@dataclass(frozen=True)
class Measured:
    """Of rank 0: steps that were taken; peak_bytes of the last one that was looked at; seconds: the median of a step but for the first ones."""

    steps: int
    peak_bytes: int | None
    seconds: float | None


def measured_of(run: Path) -> Measured | None:
    """From RUN/metrics.jsonl; None where no step was taken."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]
    if not records:
        return None
    peaks = [record["memory_bytes"] for record in records if record.get("memory_bytes")]
    seconds = [record["step_s"] for record in records[NUM_WARMUP_STEPS:] if record.get("step_s")]
    return Measured(len(records), peaks[-1] if peaks else None, median(seconds) if seconds else None)
