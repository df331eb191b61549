"""Text to tokens and back, by the `tokenizers` library; from a Hugging Face directory or a GGUF file's metadata."""

import dataclasses
import json
from pathlib import Path

import tokenizers

# How each pre-tokenizer that llama.cpp names splits text (patterns as in the models' own tokenizer.json).
SPLIT_PATTERNS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
PRE_TOKENIZERS = ("smollm", "gpt-2", *SPLIT_PATTERNS)
CONTROL, USER_DEFINED = 3, 4  # llama.cpp's token types
REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with the names of its sequence-start and sequence-end tokens."""

    backend: tokenizers.Tokenizer
    bos_token: str | None = None
    eos_token: str | None = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; special tokens written in it are parsed. `add_special_tokens` adds what the model expects around plain text
        (a start token, for some); a rendered chat template already holds it."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and the characters of `text` each one covers."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for structure, not text."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @property
    def size(self) -> int:
        """Largest token id plus one."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1


class Detokenizer:
    """Turns a stream of tokens into text, holding back a character until all of its bytes have come."""

    LONGEST, KEPT = 48, 8  # tokens decoded again at every push, and those kept as context when the window moves on

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self.window: list[int] = []
        self.sent = 0  # characters of the window's text already given out

    def push(self, ids) -> str:
        """The text that became final with these tokens (possibly empty)."""
        self.window.extend(int(i) for i in ids)
        text = self._text()
        # An unfinished character decodes to exactly one replacement mark at the end; everything before it stays as it is.
        final = text[:-1] if text.endswith(REPLACEMENT) else text
        new, self.sent = final[self.sent :], max(self.sent, len(final))
        if len(self.window) > self.LONGEST and final is text:
            self.window = self.window[-self.KEPT :]
            self.sent = len(self._text())
        return new

    def finish(self) -> str:
        """What was held back; a character that never came complete is shown as a replacement mark."""
        rest = self._text()[self.sent :]
        self.window, self.sent = [], 0
        return rest

    def _text(self) -> str:
        return self.tokenizer.decode(self.window, self.skip_special_tokens)


def from_directory(directory: str | Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face directory, or None when it has no tokenizer.json."""
    directory = Path(directory)
    file = directory / "tokenizer.json"
    if not file.exists():
        return None
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise ValueError(f"{file} is not a readable tokenizer: {error}") from None
    backend.no_padding()
    backend.no_truncation()
    settings = read_settings(directory)
    return Tokenizer(backend, _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token")))


def read_settings(directory: Path) -> dict:
    """tokenizer_config.json, or an empty dictionary when there is none."""
    file = Path(directory) / "tokenizer_config.json"
    if not file.exists():
        return {}
    try:
        settings = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{file} should hold a JSON object, not {type(settings).__name__}")
    return settings


def from_gguf(metadata: dict, path: str | Path) -> Tokenizer:
    """The byte-level BPE tokenizer stored in a GGUF file's metadata."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2":
        raise ValueError(
            f"{path} has a tokenizer of kind {model!r}; only byte-level BPE ('gpt2') is read from GGUF; load the Hugging Face checkpoint"
        )
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ValueError(f"{path} splits text by rule {pre!r}, known are {known}; load the Hugging Face checkpoint instead")
    texts, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(texts) if isinstance(texts, list) else None)
    if not (_texts(texts) and _texts(merges) and isinstance(kinds, list)) or not texts or merges is None or len(kinds) != len(texts):
        raise ValueError(f"{path} has an incomplete tokenizer (tokens, merges or token types are missing)")
    vocabulary = {text: i for i, text in enumerate(texts)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        bpe = tokenizers.models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # plain Exception, as above
        raise ValueError(f"{path} has an inconsistent tokenizer: {error}") from None
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = _pre_tokenizer(pre)
    backend.decoder = tokenizers.decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = tokenizers.normalizers.NFC()
    for wanted, special in ((CONTROL, True), (USER_DEFINED, False)):
        chosen = [text for text, kind in zip(texts, kinds, strict=True) if kind == wanted]
        added = [tokenizers.AddedToken(text, special=special, normalized=False) for text in chosen]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    bos, eos = (_id_text(metadata, key, texts) for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"))
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, vocabulary[bos])]
        )
    return Tokenizer(backend, bos, eos)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int, source: str | Path) -> None:
    """Raise ValueError when the tokenizer can produce ids the model has no embedding for."""
    if tokenizer.size > vocab_size:
        raise ValueError(
            f"the tokenizer of {source} has token ids up to {tokenizer.size - 1}, but the model's vocabulary has {vocab_size} entries; "
            "the tokenizer belongs to another model"
        )


def _pre_tokenizer(pre: str):
    kinds = tokenizers.pre_tokenizers
    if pre == "gpt-2":
        return kinds.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        return kinds.Sequence([kinds.Digits(individual_digits=True), kinds.ByteLevel(add_prefix_space=False, use_regex=True)])
    split = kinds.Split(tokenizers.Regex(SPLIT_PATTERNS[pre]), "isolated")
    return kinds.Sequence([split, kinds.ByteLevel(add_prefix_space=False, use_regex=False)])


def _texts(values) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def _id_text(metadata: dict, key: str, texts: list[str]) -> str | None:
    token = metadata.get(key)
    return texts[token] if isinstance(token, int) and 0 <= token < len(texts) else None


def _token_text(token) -> str | None:
    """tokenizer_config.json writes a token as a string or as an object with `content`."""
    return token.get("content") if isinstance(token, dict) else token
