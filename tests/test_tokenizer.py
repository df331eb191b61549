"""Text to tokens and back, and text that streams."""

import json

import pytest
import tokenizers

from angelspec_jax import tokenizer as module
from angelspec_jax.models import smollm2
from angelspec_jax.target.gguf import open_gguf
from angelspec_jax.tokenizer import Detokenizer, Tokenizer, check_vocabulary, from_directory, from_gguf

TEXTS = ["Grüße aus 東京 🎉👩‍👩‍👧! naïve", "x = [1, 22,\n\t333]\n\n", "\ufffd is a character too", "👍🏽" * 40, ""]


def byte_tokenizer() -> Tokenizer:
    """One token per byte and an end token: every character of more than one byte streams in pieces."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True, normalized=False)])
    return Tokenizer(backend, None, "<end>")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("width", [1, 3])
def test_stream_gives_whole_characters_and_the_whole_text(text, width):
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(ids[at : at + width]) for at in range(0, len(ids), width)]
    assert "".join(pieces) + stream.finish() == text == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_character_that_never_completes_is_shown_at_the_end():
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    first, *_ = tokenizer.encode("東")
    assert stream.push([first]) == ""
    assert stream.push(tokenizer.encode("a")) == "\ufffda"
    assert stream.push([first]) == ""
    assert stream.finish() == "\ufffd"


def test_bytes_that_are_no_text_do_not_hold_the_stream_back():
    tokenizer = byte_tokenizer()
    stream = Detokenizer(tokenizer)
    broken = [tokenizer.encode("東")[0]] * 200
    assert len("".join(stream.push([token]) for token in broken)) == 199


def test_special_tokens_are_parsed_and_skipped():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("a<end>b")
    end = tokenizer.token_id("<end>")
    assert ids[1] == end and tokenizer.special_ids() == {end}
    assert tokenizer.decode(ids) == "ab" and tokenizer.decode(ids, skip_special_tokens=False) == "a<end>b"
    assert Detokenizer(tokenizer).push(ids) == "ab"


def test_directory(tmp_path):
    assert from_directory(tmp_path) is None
    backend = byte_tokenizer().backend
    backend.enable_padding(length=50)
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}, "bos_token": "a"}))
    tokenizer = from_directory(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("a", "<end>")
    assert len(tokenizer.encode("a long text")) == 11  # neither padded nor cut
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="tokenizer_config.json is not valid JSON"):
        from_directory(tmp_path)


def test_vocabulary_check():
    tokenizer = byte_tokenizer()
    check_vocabulary(tokenizer, 300, "here")
    with pytest.raises(ValueError, match="token ids up to 256, but the model's vocabulary has 256 entries"):
        check_vocabulary(tokenizer, 256, "here")


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "I'm 123", ["I", "'m", "Ġ", "1", "2", "3"]),
        ("gpt-2", "I'm 123", ["I", "'m", "Ġ123"]),
        ("qwen2", "I'M 123\n", ["I", "'M", "Ġ", "1", "2", "3", "Ċ"]),
        ("llama-bpe", "I'M 1234", ["I", "'M", "Ġ", "123", "4"]),
    ],
)
def test_split_rules(pre, text, pieces):
    assert [piece for piece, _ in module._pre_tokenizer(pre).pre_tokenize_str(text)] == pieces


def test_start_token_is_added_where_the_file_says_so():
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["<s>", "a"], "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [3, 1], "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    tokenizer = from_gguf(metadata, "file")
    assert tokenizer.encode("a") == [1] and tokenizer.encode("a", add_special_tokens=True) == [0, 1]


@pytest.mark.smollm2
def test_smollm2_round_trip():
    try:
        file = smollm2(fetch=False)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    tokenizer = from_gguf(open_gguf(file).metadata, file)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer)
        assert tokenizer.decode(ids) == text == "".join(stream.push([token]) for token in ids) + stream.finish()
    # As the model's own tokenizer.json has it: digits one by one, ChatML marks as single tokens.
    assert tokenizer.encode("<|im_start|>user\n") == [1, 4093, 198] and tokenizer.encode(" 12345") == [216, 33, 34, 35, 36, 37]
