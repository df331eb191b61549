"""How every kind of case is checked. A new family adds a line here and nothing to the test."""

from collections.abc import Callable

from parity import block_drafts, block_training, chain_drafts, chain_training, generation, loss_table, rejection, scheduling, targets
from parity.case import Case, Unsupported

CHECKS: dict[str, Callable[[Case], None]] = {
    "target": targets.check,
    "angelspec_block_infer": block_drafts.check_one_round,
    "zlab_dflash_infer": block_drafts.check_rounds,
    "deepspec_dspark_infer": block_drafts.check_rounds,
    "angelspec_block_train": block_training.check_angelspec,
    "deepspec_dspark_train": block_training.check_deepspec,
    "mtp_infer": chain_drafts.check_mtp,
    "eagle3_llama_infer": chain_drafts.check_eagle3,
    "deepspec_eagle3_infer": chain_drafts.check_deepspec_eagle3,
    "mtp_train": chain_training.check_mtp,
    "angelspec_eagle3_train": chain_training.check_eagle3,
    "deepspec_eagle3_train": chain_training.check_deepspec_eagle3,
    "loss_table": loss_table.check,
    "sampling_table": rejection.check,
    "scheduler": scheduling.check,
    "e2e_zlab": generation.check_zlab,
    "e2e_deepspec": generation.check_deepspec,
}


def check(case: Case) -> None:
    """Compare everything the case holds. AssertionError where it differs, `Unsupported` where there is nothing to compare it with."""
    if case.kind not in CHECKS:
        raise Unsupported(f"cases of kind {case.kind!r}")
    CHECKS[case.kind](case)
    case.finish()
    case.verdict()
