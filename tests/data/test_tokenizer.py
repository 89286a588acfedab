import builtins
import json

import pytest

from packhorse.data.tokenizer import Bytes, load_tokenizer
from packhorse.errors import DataError

pytestmark = pytest.mark.pure

TEXT = "the rider, müde 😀\n\n  packs"


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, Bytes) and (tokenizer.vocab, tokenizer.end_of_text) == (256, None)
    assert tokenizer.encode([TEXT]) == [list(TEXT.encode())] and tokenizer.decode(list(TEXT.encode())) == TEXT
    assert tokenizer.decode([65, 255]) == "A\ufffd"


def test_a_tokenizer_json_and_the_folder_that_holds_it(tokenizer_folder):
    from tokenizers import Tokenizer

    library = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    for name in (tokenizer_folder, tokenizer_folder / "tokenizer.json"):
        tokenizer = load_tokenizer(str(name))
        assert tokenizer.vocab == library.get_vocab_size() and tokenizer.end_of_text == 0
        assert tokenizer.encode([TEXT, ""]) == [library.encode(TEXT).ids, []] and tokenizer.decode(library.encode(TEXT).ids) == TEXT


def test_nothing_is_cut_off_padded_or_put_around(tokenizer_folder):
    from tokenizers import Tokenizer, processors

    path = tokenizer_folder / "tokenizer.json"
    library = Tokenizer.from_file(str(path))
    expected = library.encode(TEXT * 10).ids
    library.enable_truncation(5)
    library.enable_padding(length=400)
    library.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    library.save(str(path))
    assert load_tokenizer(str(path)).encode([TEXT * 10]) == [expected] and len(expected) > 5


def test_a_vocabulary_with_gaps_reaches_to_its_largest_number(tokenizer_folder):
    path = tokenizer_folder / "tokenizer.json"
    told = json.loads(path.read_text())
    told["added_tokens"].append(told["added_tokens"][0] | {"id": 1000, "content": "<far>"})
    path.write_text(json.dumps(told))
    from tokenizers import Tokenizer

    largest = max(Tokenizer.from_file(str(path)).get_vocab().values())
    assert load_tokenizer(str(path)).vocab == largest + 1


def write_beside(folder, **files):
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    for name, told in files.items():
        (folder / f"{name}.json").write_text(json.dumps(told))


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({}, 0),  # by its usual name
        ({"tokenizer_config": {"eos_token": "Ġthe"}}, "Ġthe"),
        ({"tokenizer_config": {"eos_token": {"content": "Ġthe", "special": True}}}, "Ġthe"),
        ({"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": 7}}, 7),
        ({"config": {"eos_token_id": [8, 9]}}, 8),
        ({"tokenizer_config": {"eos_token": "nowhere"}, "config": {"eos_token_id": 10**6}}, 0),
    ],
)
def test_the_token_that_ends_a_text_is_looked_up_beside_the_tokenizer(tokenizer_folder, beside, expected):
    from tokenizers import Tokenizer

    write_beside(tokenizer_folder, **beside)
    library = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    expected = library.token_to_id(expected) if isinstance(expected, str) else expected
    assert load_tokenizer(str(tokenizer_folder)).end_of_text == expected is not None


def test_a_tokenizer_may_have_no_token_that_ends_a_text(tokenizer_folder):
    write_beside(tokenizer_folder)
    path = tokenizer_folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|something|>"))
    assert load_tokenizer(str(path)).end_of_text is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a b"]}}', "\xff"])
def test_a_damaged_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"tokenizer\.json is no tokenizer that") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_tokens_is_refused(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="has no tokens"):
        load_tokenizer(str(tmp_path))


def test_a_missing_file_and_a_damaged_neighbour_are_named(tmp_path, tokenizer_folder):
    with pytest.raises(DataError, match=r"data\.tokenizer = 'gpt2': cannot read gpt2: No such file .* Nothing is downloaded"):
        load_tokenizer("gpt2")
    with pytest.raises(DataError, match=r"cannot read .*empty/tokenizer\.json"):
        (tmp_path / "empty").mkdir()
        load_tokenizer(str(tmp_path / "empty"))
    (tokenizer_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json, which may say what token ends a text, is no JSON"):
        load_tokenizer(str(tokenizer_folder))


def test_a_missing_library_is_said(tokenizer_folder, monkeypatch):
    original = builtins.__import__

    def without(name, *arguments, **options):
        if name == "tokenizers":
            raise ImportError("No module named 'tokenizers'")
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"needs the library tokenizers, which is not installed .* pip install 'packhorse\[hf\]'"):
        load_tokenizer(str(tokenizer_folder))
