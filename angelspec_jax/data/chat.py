"""Conversations to tokens: chat templates in a sandbox, and the mask of what the assistant says."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jaxtyping import Bool, Int
from jinja2 import ext, nodes, sandbox

from angelspec_jax.tokenizer import Tokenizer

Messages = Sequence[Any]  # objects {"role": ..., "content": ...} and whatever else the template reads; `render` checks them
SENTINEL = "angelspec-sentinel-7f3a9c"  # stands for an assistant's words while their place in the rendered text is looked up


def render(
    template: str,
    messages: Messages,
    *,
    tokenizer: Tokenizer | None = None,
    add_generation_prompt: bool = False,
    **switches,
) -> str:
    """The text of a conversation by a model's chat template.

    `add_generation_prompt` appends what precedes the assistant's next words; `switches` (such as `enable_thinking`, `tools`) are passed
    to the template as they are. Raises ValueError with one sentence when the template is broken or refuses the conversation.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} of the conversation should be an object with a role, it is {str(message)[:80]!r}")
    names = {"bos_token": (tokenizer and tokenizer.bos_token) or "", "eos_token": (tokenizer and tokenizer.eos_token) or ""}
    values = {"tools": None, "documents": None} | names | switches
    try:
        return _compile(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
    except Exception as error:  # a template is somebody else's program and may raise anything
        raise ValueError(f"the chat template cannot render this conversation: {error}") from None


def encode_prompt(tokenizer: Tokenizer, template: str, messages: Messages, **switches) -> list[int]:
    """Token ids of a conversation up to the assistant's next words."""
    return tokenizer.encode(render(template, messages, tokenizer=tokenizer, add_generation_prompt=True, **switches))


def encode_conversation(
    tokenizer: Tokenizer,
    template: str,
    messages: Messages,
    *,
    last_turn_only: bool = False,
    **switches,
) -> tuple[Int[np.ndarray, "S"], Bool[np.ndarray, "S"]]:
    """Token ids of a whole conversation, and which of them the assistant says: its words and the token that ends its turn.

    With `last_turn_only` the earlier turns of the assistant count as context. Raises ValueError with one sentence when the template does
    not render the conversation as prefixes of itself, so that the assistant's words cannot be located.
    """
    turns = [index for index, message in enumerate(messages) if isinstance(message, Mapping) and message.get("role") == "assistant"]
    if not turns:
        raise ValueError("the conversation has no assistant turn to learn from")
    text = render(template, messages, tokenizer=tokenizer, **switches)
    ids, offsets = tokenizer.encode_with_offsets(text)
    starts = np.asarray([start for start, _ in offsets], np.int64)
    mask = np.zeros(len(ids), bool)
    special = tokenizer.special_ids()
    for turn in turns[-1:] if last_turn_only else turns:
        start, stop = _locate(template, messages, turn, text, tokenizer, switches)
        mask |= (starts >= start) & (starts < stop)
        end = _end_of_turn(ids, offsets, stop, text, special)
        if end is not None:
            mask[end] = True
    return np.asarray(ids, np.int32), mask


def _locate(template: str, messages: Messages, turn: int, text: str, tokenizer: Tokenizer, switches: dict) -> tuple[int, int]:
    """First and last character of what the assistant says in a turn.

    It starts where the prompt for this turn ends. Where the history is rendered otherwise than the prompt was (templates that drop the
    thinking of earlier turns), it starts at the words themselves. It ends where the words end: both are found by rendering the
    conversation with a sentinel in their place.
    """
    prompt = render(template, messages[:turn], tokenizer=tokenizer, add_generation_prompt=True, **switches)
    marked = [*messages[:turn], {"role": "assistant", "content": SENTINEL}, *messages[turn + 1 :]]
    before, found, after = render(template, marked, tokenizer=tokenizer, **switches).partition(SENTINEL)
    if not found or SENTINEL in after:
        raise ValueError(f"the chat template does not show the assistant's words of message {turn} exactly once; it cannot be learnt")
    stop = len(text) - len(after)
    start = len(prompt) if text.startswith(prompt) else len(before) if text.startswith(before) else None
    if start is None or start > stop or not text.endswith(after):
        raise ValueError(
            f"the chat template renders what surrounds message {turn} differently once its answer is known, so the assistant's words "
            "cannot be located; use last_turn_only, or a template whose prompts are prefixes of its conversations"
        )
    return start, stop


def _end_of_turn(ids: list[int], offsets: list[tuple[int, int]], stop: int, text: str, special: frozenset[int]) -> int | None:
    """The special token that closes a turn: the first token after the words, white space aside."""
    for index, (token, (first, last)) in enumerate(zip(ids, offsets, strict=True)):
        if first < stop:
            continue
        if token in special:
            return index
        if text[first:last].strip():
            return None
    return None


class _Generation(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words in some templates; it renders as its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser):
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation], keep_trailing_newline=False
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.datetime.now().strftime(form)}
    return environment.from_string(template)


def _to_json(value, ensure_ascii: bool = False, indent: int | None = None, separators=None, sort_keys: bool = False) -> str:
    """Plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str):
    raise jinja2.TemplateError(message)
