"""Which module a drafter's functions live in, by the type of its config.

Every module offers `drafter_specs(config)`, `create_state(config, requests, capacity, dtype, page)`,
`extend(params, config, shared, features, hidden, next_tokens, request, positions, accepted, state) -> state` and
`draft(params, config, shared, seen, state, noise, policy) -> Draft`; every config offers `family`, `taps`, `num_drafts` and
`target_num_layers`. Decoding knows drafters through this table alone.
"""

from types import ModuleType

from angelspec_jax.drafter import block, eagle3, early_exit, lookup, mtp
from angelspec_jax.drafter.block import BlockDrafter
from angelspec_jax.drafter.config import DrafterConfig
from angelspec_jax.drafter.eagle3 import Eagle3, Eagle3Config
from angelspec_jax.drafter.mtp import MTP, MTPConfig
from angelspec_jax.drafter.untrained import EarlyExitConfig, LookupConfig

AnyConfig = DrafterConfig | MTPConfig | Eagle3Config | LookupConfig | EarlyExitConfig
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
