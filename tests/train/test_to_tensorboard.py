import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from packhorse.train.metrics import MetricsFile
from packhorse.train.sinks import Sinks
from packhorse.train.to_tensorboard import TensorBoard

pytestmark = pytest.mark.pure


def seen(folder):
    """What TensorBoard's own reader shows: tag -> [(step, value)]."""
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, round(event.value, 6)) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def step(number, loss):
    return {"kind": "step", "step": number, "loss": loss, "lr": 0.5, "mfu": None}


def test_steps_done_again_after_a_resume_are_seen_once(tmp_path):
    first = TensorBoard(tmp_path, 0)
    for number in range(1, 6):
        first.write(step(number, number / 10))
    first.write({"kind": "eval", "step": 2, "loss": 2.0, "num_tokens": 40})
    # killed here: nothing is closed. Resumed at step 3, the loss of steps 4 and 5 is another.
    second = TensorBoard(tmp_path, 3)
    for number in (4, 5, 6):
        second.write(step(number, number / 100))
    second.close(failed=False)
    found = seen(tmp_path)
    assert found["train/loss"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.04), (5, 0.05), (6, 0.06)]
    assert found["validation/loss"] == [(2, 2.0)] and "train/mfu" not in found and [s for s, _ in found["train/lr"]] == [1, 2, 3, 4, 5, 6]


def test_turned_on_at_a_resume_the_steps_before_are_there(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as metrics:
        for number in (1, 2, 3):
            metrics.append(step(number, 1.0))
    folder = tmp_path / "tensorboard"
    for steps_done in (2, 3):  # the second time the events are found, and not written again
        earlier = [step(number, 1.0) for number in range(1, steps_done + 1)]
        with Sinks({"TensorBoard": lambda: TensorBoard(folder, steps_done)}, earlier, print) as sinks:  # noqa: B023
            sinks(step(steps_done + 1, 2.0))
    assert [number for number, _ in seen(folder)["train/loss"]] == [1, 2, 3, 4]


def test_a_full_disk_is_said_and_what_was_written_stays(tmp_path):
    said, sink = [], TensorBoard(tmp_path, 0)
    with Sinks({"TensorBoard": lambda: sink}, [], said.append) as sinks:
        sinks(step(1, 1.0))
        sink._writer._writer.close()
        sink._writer._writer = open("/dev/full", "wb")  # noqa: SIM115
        sinks(step(2, 1.0))
        sinks(step(3, 1.0))
    assert len(said) == 1 and "No space left on device" in said[0]
    assert seen(tmp_path)["train/loss"] == [(1, 1.0)]
