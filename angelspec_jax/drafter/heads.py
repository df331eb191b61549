"""Sequential heads: what turns the marginals of a block into a chain of tokens.

Every head is a row of `HEADS` and answers `propose(...) -> Draft` from the block's hidden states and base logits. A head that drafts left
to right gives `start` and `score` and shares the loop of `propose_chain`; one that does not (a fixed number of refining passes, a
selector) gives a `propose` of its own. Nothing outside this file asks which head a drafter has.

A chain head scores a *shortlist*: one pass over the LM head gives base logits of every slot, the top `M` candidates of each slot are kept,
and each step corrects only those. Seven dependent steps then do not read the vocabulary seven times, and the draft distribution stays exact
because it is supported on the shortlist.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from angelspec_jax.drafter import correction, markov
from angelspec_jax.drafter.config import MARKOV_HEADS, DrafterConfig
from angelspec_jax.drafter.drawing import draw, shortlist, top_margin
from angelspec_jax.drafter.types import Draft, DraftPolicy, Noise, OneHot, Shared, Sparse
from angelspec_jax.target import narrow

Judge = Callable[[Any, Array, Array, Array], Array]  # (draft index, hidden [R D], previous [R], own probability [R]) -> confidence [R]


class Propose(Protocol):
    """Draw K drafts for every request from the block's hidden states.

    `base` are the logits of `hidden` over the head's rows; `anchor` the tokens before the first slot; `positions` where the drafts will
    stand; `noise=None` drafts greedily. `judge` says how likely a draft survives.
    """

    def __call__(
        self,
        head: Any,
        config: DrafterConfig,
        shared: Shared,
        hidden: Float[Array, "R K D"],
        base: Float[Array, "R K V"],
        anchor: Int[Array, "R"],
        positions: Int[Array, "R K"],
        noise: Noise | None,
        policy: DraftPolicy,
        judge: Judge,
    ) -> Draft: ...


class Head(NamedTuple):
    """The functions of one kind of head; `head` is its parameters."""

    specs: Callable[[DrafterConfig], Any]  # -> declaration of the parameters
    start: Callable[[Any, tuple[int, ...]], Any]  # (head, shape of the chains) -> state before the first draft
    score: Callable[..., tuple[Array, Any]]  # (head, config, shared, hidden, previous, ids | None, base, state) -> scores, next state
    rows: Callable[..., PyTree]  # (head, config, embed, hidden [.. K D], previous [.. K]) -> what teacher-forced logits are made of
    logits: Callable[..., Array]  # (head, rows, head rows) -> logits, float32
    propose: Propose | None = None  # None: left to right, by `propose_chain`


def head_specs(config: DrafterConfig):
    """Declaration of the head's parameters; None without a head."""
    return HEADS[config.head].specs(config)


def propose(
    head: Any,
    config: DrafterConfig,
    shared: Shared,
    hidden: Float[Array, "R K D"],
    anchor: Int[Array, "R"],
    positions: Int[Array, "R K"],
    noise: Noise | None,
    policy: DraftPolicy,
    judge: Judge | None = None,
) -> Draft:
    """Draw a chain of K tokens from the block's hidden states. Without a `judge` a draft is trusted as far as its own probability goes."""
    base = jnp.einsum("rkd,vd->rkv", hidden, shared.head, preferred_element_type=jnp.float32)
    run = HEADS[config.head].propose or propose_chain
    return run(head, config, shared, hidden, base, anchor, positions, noise, policy, judge or _own)


def propose_chain(
    head: Any,
    config: DrafterConfig,
    shared: Shared,
    hidden: Float[Array, "R K D"],
    base: Float[Array, "R K V"],
    anchor: Int[Array, "R"],
    positions: Int[Array, "R K"],
    noise: Noise | None,
    policy: DraftPolicy,
    judge: Judge,
) -> Draft:
    """Left to right over the candidates of each slot.

    The loop over depth ends when no request's chain survives with `policy.min_survival`; the remaining drafts have survival 0.
    """
    kind = HEADS[config.head]
    scores, ids = shortlist(base, policy.candidates)
    requests, depth, size = ids.shape
    everything = size == base.shape[-1]

    def step(carry):
        k, previous, state, survival, tokens, probabilities, survivals, margins = carry
        slot_ids, slot_hidden = _slot(ids, k), _slot(hidden, k)
        slot_scores, state = kind.score(
            head, config, shared, slot_hidden, previous, None if everything else slot_ids, _slot(scores, k), state
        )
        target_ids = slot_ids if shared.draft_ids is None else shared.draft_ids[slot_ids]
        choice, p, own = draw(slot_scores, target_ids, _slot(positions, k), noise)
        token = jnp.take_along_axis(target_ids, choice[:, None], axis=1)[:, 0]
        survival = survival * judge(k, slot_hidden, previous, own)
        return (
            k + 1,
            token,
            state,
            survival,
            _put(tokens, k, token),
            _put(probabilities, k, p),
            _put(survivals, k, survival),
            _put(margins, k, top_margin(slot_scores)),
        )

    def worthwhile(carry):
        k, _, _, survival, *_ = carry
        return (k < depth) & (jnp.max(survival) >= policy.min_survival)

    start = (
        jnp.int32(0),
        anchor,
        kind.start(head, (requests,)),
        jnp.ones(requests, jnp.float32),
        jnp.zeros((requests, depth), jnp.int32),
        jnp.zeros((requests, depth, size), jnp.float32),
        jnp.zeros((requests, depth), jnp.float32),
        jnp.zeros((requests, depth), jnp.float32),
    )
    _, _, _, _, tokens, probabilities, survivals, margins = jax.lax.while_loop(worthwhile, step, start)
    target_ids = ids if shared.draft_ids is None else shared.draft_ids[ids]
    return Draft(
        tokens=tokens,
        q=OneHot() if noise is None else Sparse(target_ids, probabilities),
        survival=survivals,
        margin=margins,
    )


def teacher_rows(
    head: Any, config: DrafterConfig, embed: Float[Array, "V D"], hidden: Float[Array, "*N K D"], previous: Int[Array, "*N K"]
) -> PyTree:
    """What the logits of slots are made of when the true previous tokens are known; leaves keep the leading axes of `hidden`."""
    return HEADS[config.head].rows(head, config, embed, hidden, previous)


def row_logits(head: Any, config: DrafterConfig, rows: PyTree, head_rows: Float[Array, "V D"]) -> Float[Array, "*N V"]:
    """Logits of such rows in float32."""
    return HEADS[config.head].logits(head, rows, head_rows)


def _own(draft, hidden, previous, own):
    return own


def _project(head, rows, head_rows):
    return narrow.einsum("...d,vd->...v", rows, head_rows.astype(rows.dtype), jnp.float32)


def _stateless(head, shape):
    return None


def _slot(x, k):
    return jax.lax.dynamic_index_in_dim(x, k, axis=1, keepdims=False)


def _put(x, k, value):
    return jax.lax.dynamic_update_index_in_dim(x, value, k, axis=1)


NONE = Head(
    specs=lambda config: None,
    start=_stateless,
    score=lambda head, config, shared, hidden, previous, ids, base, state: (base, state),
    rows=lambda head, config, embed, hidden, previous: hidden,
    logits=_project,
)
CORRECTION = Head(correction.specs, _stateless, correction.score, correction.rows, _project)
MARKOV = Head(markov.specs, markov.start, markov.score, markov.rows, markov.logits)
HEADS: dict[str | None, Head] = {None: NONE, "hidden_correction": CORRECTION, **dict.fromkeys(MARKOV_HEADS, MARKOV)}
