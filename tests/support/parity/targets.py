"""A target's hidden states, logits and greedy text against Hugging Face transformers."""

import jax
import jax.numpy as jnp

from angelspec_jax.target import kv_cache
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.transformer import forward, logits
from parity.case import Case, supported


@jax.jit(static_argnames=("config", "taps"))
def step(params, config, tokens, start, cache, taps=()):
    """One causal chunk of one request, committed."""
    positions = start + jnp.arange(tokens.shape[0], dtype=jnp.int32)
    rows = uniform_rows(jnp.full((1,), start, jnp.int32), tokens.shape[0], causal=True)
    features, hidden, new_kv = forward(params, config, tokens, positions, rows, cache, taps)
    return features, hidden, logits(params, hidden), kv_cache.commit(cache, new_kv, rows.request, positions, rows.valid)


def check(case: Case) -> None:
    """Both forms of the layers, unrolled and scanned; the text is decoded once."""
    for scan_layers in (False, True):
        target = supported(load_target, case.folder, scan_layers=scan_layers, need_tokenizer=False, dtype=jnp.float32)
        for row, ids in enumerate(case.io["in.input_ids"]):
            _compare(case, target, row, jnp.asarray(ids, jnp.int32), decode=scan_layers)


def _compare(case: Case, target, row: int, tokens, decode: bool) -> None:
    layers = target.config.num_layers
    answers = case.io["out.greedy"][row] if "out.greedy" in case.io else []
    cache = kv_cache.create(target.config, 1, 8 * -(-(len(tokens) + len(answers)) // 8))
    features, hidden, scores, cache = step(target.params, target.config, tokens, 0, cache, tuple(range(-1, layers)))
    ours = {f"hidden_{index}": features[:, index] for index in range(layers)}
    ours |= {"last_layer_prenorm": features[:, layers], f"hidden_{layers}": hidden, "logits": scores}
    for name, values in ours.items():
        if f"out.{name}" in case.io:
            case.close(name, values, case.io[f"out.{name}"][row])
    if not decode or not len(answers):
        return
    said = []
    for position in range(len(tokens), len(tokens) + len(answers)):
        token = jnp.argmax(scores[-1])[None].astype(jnp.int32)
        said.append(int(token[0]))
        _, _, scores, cache = step(target.params, target.config, token, jnp.int32(position), cache)
    case.same("greedy", said, answers)
