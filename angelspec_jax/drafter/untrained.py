"""Drafters that need no training and no checkpoint, asked for by name: `lookup`, `lookup:8`, `early_exit:8`, `early_exit:8:4`."""

import dataclasses

from angelspec_jax.target.config import TransformerConfig

NAMES = "lookup[:DRAFTS] or early_exit:LAYERS[:DRAFTS]"
MOST_DRAFTS = 63  # with the anchor, what a request can verify at once

# Share of right guesses after a match of 0, 1, 2, ... (last: or more) tokens, at 25,000 places in SmolLM2-135M-Instruct's answers.
ACCEPTANCE = (0.0, 0.2, 0.52, 0.61, 0.7, 0.71, 0.76, 0.8, 0.93)


@dataclasses.dataclass(frozen=True)
class LookupConfig:
    """Drafts are copied from where the last tokens of a request's own text stood before.

    `acceptance[m]` estimates how often the next token is right after a match of m tokens (the last entry: or more); its length bounds how
    far a match is followed back.
    """

    target_num_layers: int
    num_drafts: int = 8
    acceptance: tuple[float, ...] = ACCEPTANCE
    taps: tuple[int, ...] = ()

    def __post_init__(self):
        _check_drafts(self.num_drafts)
        if len(self.acceptance) < 2 or not all(0 <= value <= 1 for value in self.acceptance):
            raise ValueError(f"acceptance must hold a probability for matches of 0, 1, ... tokens, got {self.acceptance}")

    @property
    def family(self) -> str:
        return "lookup"

    @property
    def longest_match(self) -> int:
        return len(self.acceptance) - 1


@dataclasses.dataclass(frozen=True)
class EarlyExitConfig:
    """The target's own first layers, its final norm and its head draft for the whole of it."""

    transformer: TransformerConfig  # the target's
    layers: int
    num_drafts: int = 4
    taps: tuple[int, ...] = ()

    def __post_init__(self):
        _check_drafts(self.num_drafts)
        if not 1 <= self.layers < self.target_num_layers:
            raise ValueError(
                f"early exit must run between 1 and {self.target_num_layers - 1} of the target's {self.target_num_layers} layers, "
                f"got {self.layers}"
            )

    @property
    def family(self) -> str:
        return "early_exit"

    @property
    def target_num_layers(self) -> int:
        return self.transformer.num_layers


def is_name(source) -> bool:
    """Whether `source` asks for a drafter of this module; a directory of such a name is asked for as ./lookup."""
    return isinstance(source, str) and source.partition(":")[0] in ("lookup", "early_exit")


def named(source: str, target: TransformerConfig) -> LookupConfig | EarlyExitConfig:
    """The config a name stands for. ValueError for numbers that are missing, too many or out of range."""
    kind, *numbers = source.split(":")
    try:
        values = [int(number) for number in numbers]
    except ValueError:
        raise ValueError(f"drafter {source!r} is not understood; write {NAMES} with whole numbers") from None
    if kind == "lookup" and len(values) <= 1:
        return LookupConfig(target.num_layers, values[0]) if values else LookupConfig(target.num_layers)
    if kind == "early_exit" and len(values) == 1:
        return EarlyExitConfig(target, values[0])
    if kind == "early_exit" and len(values) == 2:
        return EarlyExitConfig(target, values[0], values[1])
    raise ValueError(f"drafter {source!r} is not understood; write {NAMES}")


def _check_drafts(num_drafts: int) -> None:
    if not 1 <= num_drafts <= MOST_DRAFTS:
        raise ValueError(f"a drafter makes between 1 and {MOST_DRAFTS} drafts a round, got {num_drafts}")
