import io

import numpy as np
import pytest

from packhorse.data import Corpus, counting_nats
from packhorse.train.config import Config, DataConfig, RunConfig
from packhorse.train.console import Console
from packhorse.train.metrics import MetricsFile, read_metrics
from packhorse.train.report import counting_on_validation, print_report

pytestmark = pytest.mark.pure


def corpus():
    generator = np.random.default_rng(0)
    train, validation = (generator.integers(97, 107, size, dtype=np.uint8) for size in (2000, 41))
    return Corpus("texts", train, validation, 2, "digest", "1 of 2 files")


CONFIG = Config(run=RunConfig(steps=3, eval_batches=2), data=DataConfig(seq_len=10, micro_batch_size=2, global_batch_size=2))


def test_counting_models_are_judged_on_the_bytes_that_the_model_predicts():
    # Four samples of ten labels in 41 bytes: every byte but the first, once.
    found = counting_on_validation(CONFIG, corpus())
    for order in (1, 2, 3):
        assert found[order] == pytest.approx(counting_nats(corpus().train, corpus().validation, order)[1:].mean(), rel=1e-12)


@pytest.mark.parametrize("ledger", ["the ledger", None])
def test_the_end_of_a_run(tmp_path, ledger):
    out = io.StringIO()
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as metrics:
        print_report(CONFIG, corpus(), 1.2345, ledger, metrics, Console(out))
    said = out.getvalue()
    assert "validation loss 1.2345 nats/byte\ncounting models on the same bytes: order 1: 2.3" in said  # ln 10 = 2.30
    assert ("the ledger" in said) == (ledger is not None) and "None" not in said
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    assert record["kind"] == "end" and record["step"] == 3 and record["counting_nats"]["1"] == pytest.approx(np.log(10), abs=0.03)


def test_tokens_have_no_counting_models(tmp_path):
    out = io.StringIO()
    tokens = np.arange(50, dtype=np.uint16)
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as metrics:
        print_report(CONFIG, Corpus("a.bin", tokens, tokens, None, "digest", "the last 5%", "token", 50), 1.2345, None, metrics, Console(out))
    assert out.getvalue().rstrip().endswith("validation loss 1.2345 nats/token")
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"kind": "end", "step": 3, "loss": 1.2345}]
