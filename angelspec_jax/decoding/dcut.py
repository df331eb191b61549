"""D-cut: whether a round drafts at all, and which drafts of the whole batch are worth verifying (AngelSpec section on D-cut).

A round has room for a few static numbers of rows. Over all requests the drafts with the highest survival are kept, ties to the shallower:
survival never grows along a branch, so what is kept of a request is a chain's prefix, or a tree with every node's parent. How many are kept
is the budget, chosen by one of three policies:

* retrospective: the budget with the most expected tokens per unit of cost for the very drafts at hand; every budget is weighed, because
  costs are stairs on which a climb that stops at the first descent gets stuck. Looks at drafts to decide about them, so it is lossless with
  coupled acceptance only (DSpark, arXiv 2607.05147, appendix A).
* lagged: the same choice on what the round before expected; which drafts fill the budget is decided on fresh estimates (DSpark 5.2).
* causal: drafts are admitted one by one in the order of survival until the next one does not raise the rate (DSpark algorithm 1).

The last two keep a draft by what was known before it was drawn, provided that its survival was.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from angelspec_jax.decoding import margins
from angelspec_jax.decoding.margins import Margins
from angelspec_jax.drafter.types import Draft

PROBE = 4  # rounds between two looks at a drafter that has not paid lately; twice as many after each look that did not pay either
LOOKING = 0.01  # share of the time that such looks may cost once the pauses are long
LONGEST_PAUSE = 64
MEMORY = 0.9  # of the running mean of what drafting rounds yield, a request and round
REQUESTS = 8  # that count towards that mean in a round, at most: requests of one round have much in common
MODES = ("retrospective", "lagged", "causal")
FREE, PLAIN = -1, -2  # values of `Policy.forced`


@struct.dataclass
class Policy:
    """Numbers the step weighs drafts with; traced, so changing them compiles nothing.

    `costs[b]` is the duration of a round at budget b without its draft, `draft_cost` that of drafting, in any unit. Where budget 0 exists
    and drafting has not paid lately, rounds go without a draft but for a probe now and then. The loop over draft depth ends when no chain
    survives with `min_survival`, or with what any budget would verify.
    """

    costs: Float[Array, "budgets"]
    draft_cost: Float[Array, ""]
    min_survival: Float[Array, ""]
    mode: Any = np.int32(0)  # index into MODES
    forced: Any = np.int32(FREE)  # a budget that is always taken (the last: no cut; another: a fixed ratio), or PLAIN: no draft at all
    bonus: Any = np.float32(1.0)  # 1: the token that every request gets anyway counts as yield, which favours smaller budgets; 0: not
    margin: Any = np.bool_(False)  # estimate survival from the margin of the two best draft logits instead of the drafter's own word


@struct.dataclass
class Memory:
    """What D-cut learned in earlier rounds."""

    pace: Float[Array, ""]  # running mean of the speed of rounds with a draft, plain rounds being 1; starts high, so that the first draft
    wait: Int[Array, ""]  # rounds until a drafter that does not pay is looked at again
    pause: Int[Array, ""]  # rounds between such looks
    expected: Float[Array, "budgets"]  # drafts per request that the last draft was expected to have accepted, by budget
    margins: Margins


@struct.dataclass
class Cut:
    """`keep[r, k]`: draft k of request r is verified; `budget` is an index into the budgets."""

    budget: Int[Array, ""]
    keep: Bool[Array, "R K"]
    survival: Float[Array, "R K"]  # the estimates it was decided on
    expected: Float[Array, "budgets"]  # as in `Memory`


def create_memory(budgets: tuple[int, ...]) -> Memory:
    return Memory(
        pace=jnp.float32(jnp.inf),
        wait=jnp.int32(0),
        pause=jnp.int32(PROBE),
        expected=jnp.asarray(budgets, jnp.float32),
        margins=margins.create(budgets[-1]),
    )


def worth_drafting(policy: Policy, budgets: tuple[int, ...], has_drafter: bool, memory: Memory) -> Bool[Array, ""] | bool:
    """Whether this round drafts: always, unless plain rounds are allowed and have been the better use of time."""
    if not has_drafter or budgets[-1] == 0:
        return False
    if budgets[0] > 0:
        return True
    pays = (memory.pace > 1.0) | (memory.wait <= 0)
    return jnp.where(policy.forced == FREE, pays, policy.forced != PLAIN)


def unbiased(mode: Int[Array, ""]) -> Int[Array, ""]:
    """The mode, or causal for one that looks at drafts to decide about them: the rejection rule would not be exact."""
    return jnp.where(mode == MODES.index("retrospective"), MODES.index("causal"), mode).astype(jnp.int32)


def min_survival(policy: Policy, budgets: tuple[int, ...], requests: int, running: Int[Array, ""]) -> Float[Array, ""]:
    """The survival below which no budget verifies a draft.

    Going from budget i to j adds at most `rows * survival` to what is expected, and every request gets its bonus token at either: a draft
    below the least `bonus * (C_j / C_i - 1) / rows` is not worth its row anywhere.
    """
    total = policy.costs + policy.draft_cost
    edges = np.asarray(budgets, np.float32) * requests
    rows = edges[None, :] - edges[:, None]
    bound = policy.bonus * running.astype(jnp.float32) * (total[None, :] / total[:, None] - 1.0) / np.where(rows > 0, rows, 1.0)
    least = jnp.min(jnp.where(jnp.asarray(rows > 0), bound, jnp.inf))
    least = jnp.where(jnp.isfinite(least) & (policy.forced == FREE) & ~policy.margin, jnp.clip(least, 0.0, 1.0), 0.0)
    return jnp.maximum(policy.min_survival, least)


def choose(
    policy: Policy,
    budgets: tuple[int, ...],
    draft: Draft,
    running: Bool[Array, "R"],
    drafting: Bool[Array, ""] | bool,
    memory: Memory,
) -> Cut:
    """Choose the budget and the drafts that fill it."""
    depth = depths(draft)
    survival = draft.survival
    if draft.margin is not None:
        fitted = margins.survival(memory.margins, draft.margin, draft.parents, depth)
        survival = jnp.where(policy.margin, jnp.where(survival > 0, fitted, 0.0), survival)
    survival = jnp.where(running[:, None] & jnp.asarray(drafting), survival, 0.0)
    requests, drafts = survival.shape
    everything = requests * drafts
    order = jax.lax.sort(
        (-survival.reshape(-1), depth.reshape(-1), jnp.arange(everything, dtype=jnp.int32)), num_keys=3
    )
    reach = jnp.concatenate([jnp.zeros((1,), jnp.float32), jnp.cumsum(-order[0])])
    rank = jnp.zeros((everything,), jnp.int32).at[order[2]].set(jnp.arange(everything, dtype=jnp.int32)).reshape(requests, drafts)

    alive = jnp.sum(running, dtype=jnp.int32)
    many = jnp.maximum(alive, 1).astype(jnp.float32)
    edges = jnp.asarray(budgets, jnp.int32)
    room = jnp.minimum(requests * (1 + edges) - alive, everything)  # rows of requests that are over go to the others
    costs = policy.costs + jnp.where(drafting, policy.draft_cost, 0.0)
    bonus = policy.bonus * many
    found = reach[room]
    retrospective = jnp.argmax((bonus + found) / costs)
    lagged = jnp.argmax((bonus + memory.expected * many) / costs)

    # One by one: the n-th draft costs what the smallest budget with room for n does.
    stair = jnp.sum(room[None, :] < jnp.arange(everything + 1, dtype=jnp.int32)[:, None], axis=1)
    rate = (bonus + reach) / costs[jnp.minimum(stair, len(budgets) - 1)]
    admitted = jnp.sum(jnp.cumprod((rate[1:] > rate[:-1]).astype(jnp.int32)))
    causal = jnp.minimum(stair[admitted], len(budgets) - 1)

    budget = jnp.stack([retrospective, lagged, causal])[policy.mode].astype(jnp.int32)
    learning = policy.margin & (memory.margins.refits < margins.LEARNING)  # of drafts never verified nothing is learned
    budget = jnp.where(learning, len(budgets) - 1, jnp.where(policy.forced >= 0, policy.forced, budget))
    budget = jnp.where(drafting, budget, 0)
    free = (policy.forced == FREE) & ~learning
    limit = jnp.where(free & (policy.mode == MODES.index("causal")), jnp.minimum(admitted, room[budget]), room[budget])
    keep = (rank < limit) & (survival > 0)
    return Cut(budget, keep, survival, jnp.where(drafting, found / many, memory.expected))


def compact(draft: Draft, keep: Bool[Array, "R K"]) -> tuple[Draft, Int[Array, "R"]]:
    """The kept drafts of every request first, in their order, and how many they are; a chain's kept drafts are first already."""
    count = jnp.sum(keep, axis=1, dtype=jnp.int32)
    if draft.parents is None:
        return draft, count
    order = jnp.argsort(~keep, axis=1, stable=True).astype(jnp.int32)
    place = jnp.argsort(order, axis=1).astype(jnp.int32)  # where each draft went

    def moved(x):
        return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)

    parents = moved(draft.parents)
    parents = jnp.where(parents < 0, -1, jnp.take_along_axis(place, jnp.maximum(parents, 0), axis=1))
    # A draft that was cut may have a parent that now stands behind it; nothing of it is read.
    parents = jnp.where(jnp.arange(parents.shape[1], dtype=jnp.int32)[None] < count[:, None], parents, -1)
    per_draft = jax.tree.map(moved, (draft.tokens, draft.survival, draft.q, draft.margin))
    tokens, survival, q, margin = per_draft
    return Draft(tokens, q, survival, parents, margin), count


def depths(draft: Draft) -> Int[Array, "R K"]:
    """How many drafts lie between each draft and the anchor."""
    requests, drafts = draft.tokens.shape
    if draft.parents is None:
        return jnp.broadcast_to(jnp.arange(drafts, dtype=jnp.int32), (requests, drafts))
    depth = jnp.zeros((requests, drafts), jnp.int32)
    for node in range(1, drafts):  # parents come first
        parent = draft.parents[:, node]
        above = jnp.take_along_axis(depth, jnp.maximum(parent, 0)[:, None], axis=1)[:, 0]
        depth = depth.at[:, node].set(jnp.where(parent < 0, 0, above + 1))
    return depth


def remember(policy: Policy, memory: Memory, cut: Cut | None, drafting, count, running: Bool[Array, "R"]) -> Memory:
    """Take in what a round yielded: `count[r]` tokens."""
    if cut is None:
        return memory
    requests = jnp.maximum(jnp.sum(running), 1).astype(jnp.float32)
    plain_rounds = (policy.costs[cut.budget] + policy.draft_cost) / policy.costs[0]  # that the time would have been enough for
    yielded = jnp.sum(count).astype(jnp.float32) / requests / plain_rounds
    # The first measured round replaces the start value.
    kept = MEMORY ** jnp.minimum(requests, float(REQUESTS))
    mixed = jnp.where(jnp.isinf(memory.pace), yielded, kept * memory.pace + (1 - kept) * yielded)
    pace = jnp.where(drafting, mixed, memory.pace)
    pays = pace > 1.0
    lost = plain_rounds * (1.0 - pace)
    longest = jnp.clip(lost / LOOKING, PROBE, LONGEST_PAUSE).astype(jnp.int32)
    pause = jnp.where(drafting, jnp.where(pays, PROBE, jnp.minimum(2 * memory.pause, longest)), memory.pause)
    wait = jnp.where(drafting, memory.pause - 1, memory.wait - 1)
    return dataclasses.replace(memory, pace=pace, pause=pause, wait=wait, expected=cut.expected)
