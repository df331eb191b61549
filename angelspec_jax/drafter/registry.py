"""Which module a drafter's functions live in, by the type of its config.

Every module offers `drafter_specs(config)`, `create_state(config, requests, capacity, dtype, page)`,
`extend(params, config, shared, features, hidden, next_tokens, request, positions, accepted, state) -> state` and
`draft(params, config, shared, seen, state, noise, policy) -> Draft`; every config offers `family`, `taps`, `num_drafts` and
`target_num_layers`. Decoding knows drafters through this table alone.

A module whose drafts may form trees offers two functions more, which `decoding.tree` calls level by level. A level extends the best paths
of the level before, one in each of W *lanes*:

`start_tree(params, config, shared, seen, state, policy, lanes) -> fixed, memory`
    What all levels read (such as a block's hidden states), and what the lanes carry from level to level (such as a head's state, or keys
    and values of the rows in flight). Both are pytrees of fixed shapes.
`expand(params, config, shared, seen, state, fixed, memory, depth, tokens, origin, policy) -> ids, scores, memory`
    `depth` int32[] counts the drafts on each lane's path, `tokens` [R, W] are the last ones (at depth 0 the anchor, in every lane), and
    `origin` [R, W] says which lane of the level before each path continues (0 at depth 0): memory is gathered by it. `ids` int32[R, W, M]
    are distinct candidates in the target's vocabulary for position prefix_length + 1 + depth, `scores` float32 their logits.
`tree_lanes(config) -> int`, optional
    The most lanes there can be. A drafter that runs a model at every level has them in flight together: W * num_drafts <= 64 rows.
"""

from types import ModuleType

from angelspec_jax.drafter import block, eagle3, early_exit, lookup, mtp
from angelspec_jax.drafter.block import BlockDrafter
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.eagle3 import Eagle3, Eagle3Config
from angelspec_jax.drafter.mtp import MTP, MTPConfig
from angelspec_jax.drafter.untrained import EarlyExitConfig, LookupConfig

TrainableConfig = DrafterConfig | MTPConfig | Eagle3Config
AnyConfig = TrainableConfig | LookupConfig | EarlyExitConfig
AnyDrafter = BlockDrafter | MTP | Eagle3 | None

MODULES: dict[type, ModuleType] = {
    DrafterConfig: block,
    MTPConfig: mtp,
    Eagle3Config: eagle3,
    LookupConfig: lookup,
    EarlyExitConfig: early_exit,
}


def module(config: AnyConfig) -> ModuleType:
    """The module with the functions of this kind of drafter."""
    return MODULES[type(config)]
