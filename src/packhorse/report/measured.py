"""What was measured in a run, for the page of its plan. No torch."""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from packhorse.train.meter import NUM_WARMUP_STEPS
from packhorse.train.metrics import read_metrics


@dataclass(frozen=True)
class Measured:
    """Of rank 0: steps that were taken; peak_bytes, and bytes on the host and sent to other ranks, of the last one that was looked at; seconds: the
    median of a step but for the first ones."""

    steps: int
    peak_bytes: int | None
    seconds: float | None
    host_bytes: int | None = None
    sent_bytes: int | None = None


def measured_of(run: Path) -> Measured | None:
    """From RUN/metrics.jsonl; None where no step was taken."""
    records = [record for record in read_metrics(run / "metrics.jsonl") if record["kind"] == "step"]
    if not records:
        return None
    peak, host, sent = (next((r[key] for r in reversed(records) if r.get(key)), None) for key in ("memory_bytes", "host_bytes", "sent_bytes"))
    seconds = [record["step_s"] for record in records[NUM_WARMUP_STEPS:] if record.get("step_s")]
    return Measured(len(records), peak, median(seconds) if seconds else None, host, sent)
