import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from packhorse.checkpoint import write_checkpoint
from packhorse.data.tokenizer import Bytes, load_tokenizer
from packhorse.errors import CheckpointError, ConfigError, UserError
from packhorse.models.gpt import GPT
from packhorse.train.build import build_model
from packhorse.train.config_file import config_from_dict, format_config
from packhorse.train.sample import Writer, load_writer, logits, printable, write

pytestmark = pytest.mark.cpu

WINDOW = 8


class Counting(torch.nn.Module):
    """Says with certainty that token n is followed by n + 1, or by what `follows` says. Remembers the windows it was shown."""

    def __init__(self, vocab=256, follows=None):
        super().__init__()
        self.vocab, self.follows, self.shown = vocab, follows or {}, []
        self.head = torch.nn.Identity()

    def forward(self, ids, labels):
        self.shown.append(ids[0].tolist())
        scores = torch.full((*ids.shape, self.vocab), -100.0)
        for place, token in enumerate(ids[0].tolist()):
            scores[0, place, self.follows.get(token, token + 1)] = 100.0
        self.head(scores)


def writer(model, tokenizer=None):
    return Writer(model, tokenizer or Bytes(), WINDOW, model.vocab, checkpoint=None)


def test_each_token_follows_from_the_last_window(tmp_path):
    model = Counting()
    assert "".join(write(writer(model), "abc", tokens=9)) == "abcdefghijkl"
    assert model.shown[0] == list(b"abc") and model.shown[-1] == list(b"defghijk") and max(map(len, model.shown)) == WINDOW


def test_logits_are_those_of_the_token_after_the_last():
    torch.manual_seed(0)
    model = GPT(vocab=50, layers=2, width=16, heads=2, seq_len=WINDOW).eval()
    ids = torch.randint(50, (1, 5))
    found = logits(model, ids)
    # The loss of one label is -log softmax of its logit, whichever label: that gives the logits up to a constant.
    losses = torch.tensor([model(ids, torch.tensor([[-100] * 4 + [label]])).item() for label in range(50)])
    assert torch.allclose(found.log_softmax(0), -losses, atol=1e-5) and not model.head._forward_hooks


class Fixed(torch.nn.Module):
    """The same logits after every token."""

    def __init__(self, scores):
        super().__init__()
        self.scores, self.vocab, self.head = scores, len(scores), torch.nn.Identity()

    def forward(self, ids, labels):
        self.head(self.scores.expand(1, ids.shape[1], -1))


def text(model, **options):
    return "".join(write(writer(model), "a", **options))[1:]


def test_the_same_seed_gives_the_same_text_and_the_shares_are_those_of_the_softmax():
    scores = torch.full((128,), float("-inf"))
    scores[ord("x")], scores[ord("y")], scores[ord("z")] = 0.0, 1.0, -1.0
    model = Fixed(scores)
    assert text(model, tokens=50, seed=3) == text(model, tokens=50, seed=3) != text(model, tokens=50, seed=4)
    for temperature, top_k in ((1.0, None), (0.5, None), (1.0, 2), (1.0, 500)):
        drawn = text(model, tokens=4000, temperature=temperature, top_k=top_k)
        weights = torch.exp(torch.tensor([0.0, 1.0, -1.0]) / temperature)
        weights[2] *= top_k != 2
        for letter, share in zip("xyz", weights / weights.sum(), strict=True):
            assert drawn.count(letter) / 4000 == pytest.approx(share.item(), abs=0.03)
    assert text(model, tokens=20, temperature=0) == text(model, tokens=20, temperature=1e-30) == "y" * 20 == text(model, tokens=20, top_k=1)


def test_characters_of_several_bytes_come_whole():
    first, second = "é".encode()
    model = Counting(follows={ord("a"): first, first: second, second: ord("a")})
    assert list(write(writer(model), "a", tokens=4)) == ["a", "é", "a", "\ufffd"]  # cut short by the number of tokens


def test_rows_beyond_the_tokenizers_tokens_are_never_drawn():
    scores = torch.zeros(300)
    scores[299], scores[65] = 100.0, 50.0
    assert text(Fixed(scores), tokens=3) == "AAA"


def test_a_tokenizer_and_its_end_of_text(tmp_path):
    library = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "</s>": 3, "?": 4}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["</s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert "".join(write(writer(Counting(5), tokenizer), "one", tokens=9)) == "one two three"
    with pytest.raises(UserError, match=r"token 2 .*knows those below 2"):
        write(writer(Counting(2), tokenizer), "one three", tokens=9)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ("a\u00e9", {}, r"token 195 .*knows those below 128"),
        ("a", {"tokens": 0}, "at least one token"),
        ("a", {"temperature": -0.1}, "temperature -0.1"),
        ("a", {"temperature": float("nan")}, "temperature nan"),
        ("a", {"top_k": 0}, "with top-k 0"),
    ],
)
def test_mistakes(prompt, options, message):
    with pytest.raises(UserError, match=message):
        write(writer(Counting(128)), prompt, **({"tokens": 5} | options))


def test_control_characters_do_not_reach_a_terminal():
    assert printable("a\x1b[2J\tb\nc\x00é\x9b") == "a\ufffd[2J\tb\nc\ufffdé\ufffd"


SETTINGS = {"model": {"layers": 1, "width": 16, "heads": 2}, "data": {"seq_len": WINDOW}}


@pytest.fixture
def saved(tmp_path):
    """saved(kind=..., step=...) -> RUN with one checkpoint more, and the model whose parameters are in it."""

    def make(step=1, **model):
        given = SETTINGS | {"model": model or SETTINGS["model"]}
        (tmp_path / "config.toml").write_text(format_config(config_from_dict(given)))
        model = build_model(config_from_dict(given | {"run": {"seed": 100 + step}}))
        tensors = {f"param/{name}": tensor for name, tensor in model.named_parameters()} | {"state/m": torch.zeros(9)}
        write_checkpoint(tmp_path / "checkpoints" / f"step-{step}", tensors, {"step": {}, "extra": {}})
        return tmp_path, model.eval()

    return make


def load(run, checkpoint=None, overrides=()):
    return load_writer(run, checkpoint=checkpoint, overrides=list(overrides), say=lambda text: None)


@pytest.mark.parametrize("model", [{}, {"kind": "lstm", "layers": 1, "width": 16}])
def test_a_run_is_loaded_from_its_newest_whole_checkpoint(saved, model):
    run, older = saved(step=5, **model)
    _, newer = saved(step=6, **model)
    ids = torch.randint(256, (1, 5))
    assert torch.equal(logits(load(run).model, ids), logits(newer, ids)) and load(run).step == 6
    assert torch.equal(logits(load(run, run / "checkpoints" / "step-5").model, ids), logits(older, ids))
    (run / "checkpoints" / "step-6" / "manifest.json").unlink()
    assert load(run).step == 5 and not load(run).model.training


def test_a_hugging_face_model_with_its_tokenizer(saved, tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 1,
        "n_positions": 16,
        "vocab_size": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    run, model = saved(kind="hf", config=str(folder))
    ids = torch.randint(256, (1, 5))
    with torch.no_grad():
        assert torch.equal(logits(load(run).model, ids), model(input_ids=ids).logits[0, -1])
    assert len("".join(write(load(run), "ab", tokens=6, temperature=0))) > 2


def test_runs_that_cannot_be_sampled(saved, tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.toml"):
        load(tmp_path / "nowhere")
    run, _ = saved(kind="bert", layers=1, width=16, heads=2)
    with pytest.raises(ConfigError, match="fills in hidden tokens"):
        load(run)
    run, _ = saved()
    with pytest.raises(CheckpointError, match=r"'param/blocks\.0\.attention\.out\.bias' is \(16,\), expected \(32,\)|'param/.* expected"):
        load(run, overrides=["model.width=32"])
    with pytest.raises(ConfigError, match=r"--set data\.tokenizer="):
        load(run, overrides=["data.corpus=tokens.bin", "model.vocab=1000"])
    (run / "checkpoints" / "step-1" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load(run)
