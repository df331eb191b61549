"""What every drafter takes and returns."""

import jax
from flax import struct
from jaxtyping import Array, Float, Int, UInt32

from angelspec_jax.target.kv_cache import KVCache
from angelspec_jax.target.transformer import TargetParams


@struct.dataclass
class Shared:
    """The target's weights a drafter borrows, frozen: embedding and the head's rows, all or the draft vocabulary's."""

    embed: jax.Array  # [V, D]
    head: jax.Array  # [V', D]
    draft_ids: jax.Array | None = None  # int32[V'] target id of each head row; None = identity


@struct.dataclass
class OneHot:
    """The draft was chosen without randomness."""


@struct.dataclass
class Sparse:
    """The draft was drawn from these candidates; every other token had probability zero."""

    ids: Int[Array, "R K M"]
    p: Float[Array, "R K M"]


@struct.dataclass
class Draft:
    """A proposal for every request: a chain or tree of at most K tokens.

    `parents[r, k]` is the index of draft k's parent among the drafts, -1 for the anchor; None says the drafts form a chain.
    `survival[r, k]` estimates the probability that the draft and all its ancestors are accepted; it is 0 for drafts that were not made.
    """

    tokens: Int[Array, "R K"]
    q: OneHot | Sparse
    survival: Float[Array, "R K"]
    parents: Int[Array, "R K"] | None = None
    margin: Float[Array, "R K"] | None = None  # how far the best token's logit lay above the second; None where no logits are scored


@struct.dataclass
class Noise:
    """Where a request's randomness comes from: its seed, and the temperature its drafts are drawn at (0 = greedy)."""

    seeds: UInt32[Array, "R"]
    temperature: Float[Array, "R"]


@struct.dataclass
class Seen:
    """What a drafter may look at when it drafts: the text so far, and the target with its cache of everything before the anchor."""

    anchor: Int[Array, "R"]  # last token of each request, not in any cache yet
    prefix_length: Int[Array, "R"]  # where the anchor stands
    tokens: Int[Array, "R S"]  # the text, anchor included
    target: TargetParams | None = None
    cache: KVCache | None = None


@struct.dataclass
class DraftPolicy:
    """How far to draft: stop when no request's next token survives with at least `min_survival`; candidates of the sequential head."""

    min_survival: Float[Array, ""]
    candidates: int = struct.field(pytree_node=False, default=64)  # M; 0 scores the whole draft vocabulary at every step


@struct.dataclass
class DrafterState:
    """A block drafter's memory: the keys and values of its context, per draft layer."""

    cache: KVCache
