"""Chat templates, and the mask of what the assistant says."""

import numpy as np
import pytest
import tokenizers

from angelspec_jax.data.chat import encode_conversation, encode_prompt, render
from angelspec_jax.tokenizer import Tokenizer

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant' }}
{{ '' }}{% endif %}"""
# Shaped like Qwen3's: the thinking of earlier turns is dropped, and thinking can be switched off.
THINKING = """{%- set last = messages | length - 1 -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- set words = message.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') if '</think>' in message.content else '' -%}
{%- if loop.index0 == last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- words -}}
{%- else -%}{{- message.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
# Shaped like Llama 2's: white space before the end token, the answer trimmed.
SPACED = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[U] {{ message.content }} [/U]
{%- else %} {{ message.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"""
TALK = [
    {"role": "user", "content": "Hi é"},
    {"role": "assistant", "content": "Hello 東京!"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>", "</s>")])
    return Tokenizer(backend, "<s>", "</s>")


def said(tokenizer, template, messages, **options) -> tuple[str, str]:
    """The whole text and the part under the mask."""
    ids, mask = encode_conversation(tokenizer, template, messages, **options)
    assert ids.dtype == np.int32 and mask.dtype == bool and ids.shape == mask.shape
    return tokenizer.decode(ids, False), tokenizer.decode(ids[mask], False)


def test_assistant_words_and_their_end_are_learnt(tokenizer):
    text, learnt = said(tokenizer, CHATML, TALK)
    assert text == "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK)
    assert learnt == "Hello 東京!<|im_end|>It is 4.<|im_end|>"


def test_last_turn_only(tokenizer):
    assert said(tokenizer, CHATML, TALK, last_turn_only=True)[1] == "It is 4.<|im_end|>"


def test_prompt_is_a_prefix_of_the_conversation(tokenizer):
    ids, mask = encode_conversation(tokenizer, CHATML, TALK)
    prompt = encode_prompt(tokenizer, CHATML, TALK[:-1])
    assert ids[: len(prompt)].tolist() == prompt and mask[len(prompt)] and not mask[len(prompt) - 1]


def test_words_that_repeat_elsewhere_or_are_empty(tokenizer):
    talk = [{"role": "user", "content": "assistant"}, {"role": "assistant", "content": "assistant"}]
    assert said(tokenizer, CHATML, talk)[1] == "assistant<|im_end|>"
    assert said(tokenizer, CHATML, [talk[0], {"role": "assistant", "content": ""}])[1] == "<|im_end|>"


def test_thinking_is_learnt_where_it_is_shown(tokenizer):
    talk = [*TALK[:1], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, TALK[2], {"role": "assistant", "content": "4"}]
    text, learnt = said(tokenizer, THINKING, talk)
    assert "hm" not in text and learnt == "Hello<|im_end|><think>\n\n</think>\n\n4<|im_end|>"
    talk[3] = {"role": "assistant", "content": "<think>\nsum\n</think>\n\n4"}
    assert said(tokenizer, THINKING, talk)[1] == "Hello<|im_end|><think>\nsum\n</think>\n\n4<|im_end|>"


def test_switches_reach_the_template(tokenizer):
    assert said(tokenizer, THINKING, TALK, enable_thinking=False)[1] == "Hello 東京!<|im_end|>It is 4.<|im_end|>"
    assert render(THINKING, TALK[:1], add_generation_prompt=True, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert render(THINKING, TALK[:1], add_generation_prompt=True).endswith("assistant\n")


def test_space_before_the_end_token(tokenizer):
    text, learnt = said(tokenizer, SPACED, TALK)
    assert text.startswith("<s>[U] Hi é [/U] Hello 東京! </s>[U]")
    assert learnt == " Hello 東京!</s> It is 4.</s>"


def test_template_helpers():
    assert render("{{ {'a': ['é', '<']} | tojson }}", []) == '{"a": ["é", "<"]}'
    assert render("{{ strftime_now('%Y') }}", []).isdigit()
    assert render("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", TALK) == "user"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!", TALK) == "Hi é!"
    assert render("{{ tools is none }}", []) == "True"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "cannot render"),
        ("{{ messages[0].nothing.more }}", "cannot render"),
        ("{{ messages[0].content + 1 }}", "cannot render"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{% for i in range(10000000) %}{% endfor %}", "cannot render"),
        ("{{ 1 / 0 }}", "cannot render"),
    ],
)
def test_broken_or_hostile_template(template, message):
    with pytest.raises(ValueError, match=message):
        render(template, TALK)


@pytest.mark.parametrize(
    ("template", "talk", "message"),
    [
        (CHATML, TALK[:1], "no assistant turn"),
        (CHATML, ["hello"], "no assistant turn"),
        (
            "{{ messages | length }}{% if add_generation_prompt %}:{% endif %}",
            TALK,
            "does not show the assistant's words of message 1 exactly once",
        ),
        ("{{ messages[-1].content }}{{ messages[-1].content }}", TALK[:2], "exactly once"),
        ("{{ messages[-1].content | length }}{{ messages[-1].content }}", TALK[:2], "renders what surrounds message 1 differently"),
    ],
)
def test_conversation_that_cannot_be_masked(tokenizer, template, talk, message):
    with pytest.raises(ValueError, match=message):
        encode_conversation(tokenizer, template, talk)


@pytest.mark.parametrize("talk", [["hello"], [{"content": "no role"}], [{"role": 3}]])
def test_message_that_is_none(talk):
    with pytest.raises(ValueError, match="message 0 of the conversation should be an object with a role"):
        render(CHATML, talk)
