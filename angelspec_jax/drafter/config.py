"""What a drafter is: context conditioning x backbone x sequential head."""

import dataclasses

from angelspec_jax.target.config import TransformerConfig

CONTEXTS = ("fc", "fusion", "fc_fusion")
HEADS = (None, "hidden_correction")
LAYOUTS = ("same_position", "anchor_first")
FAMILIES = {  # family -> (context, head)
    "dflash": ("fc", None),
    "dfly": ("fc_fusion", "hidden_correction"),
}


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A block drafter for one target.

    `layout` says what the K slots of a block predict: "same_position": slot k predicts the token at anchor + k, slot 0 is unused and a
    block yields K - 1 drafts; "anchor_first": slot k predicts anchor + k + 1, K drafts (spec of both: DFlash and DSpark reports).
    """

    family: str
    transformer: TransformerConfig  # the draft layers; vocab_size is the target's
    block_size: int  # K
    mask_token: int
    taps: tuple[int, ...]  # 0-based target layers whose outputs condition the drafter
    target_num_layers: int
    layout: str = "same_position"
    context: str = "fc"
    head: str | None = None
    correction_size: int | None = None  # hidden width of the correction; None = hidden_size
    draft_vocab: int | None = None  # rows of the frequency-ranked draft head; None = the target's whole vocabulary

    def __post_init__(self):
        if self.layout not in LAYOUTS:
            raise ValueError(f"block layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.context not in CONTEXTS:
            raise ValueError(f"context must be one of {', '.join(CONTEXTS)}, got {self.context!r}")
        if self.head not in HEADS:
            raise ValueError(f"head must be one of {HEADS}, got {self.head!r}")
        if self.block_size < 2 or self.block_size > 64:
            raise ValueError(f"block_size must be between 2 and 64, got {self.block_size}")
        if not self.taps:
            raise ValueError("taps must name at least one target layer")
        for tap in self.taps:
            if not -1 <= tap < self.target_num_layers:
                raise ValueError(f"tapped layer {tap} does not exist in a target of {self.target_num_layers} layers")
        if not 0 <= self.mask_token < self.transformer.vocab_size:
            raise ValueError(f"mask_token {self.mask_token} is outside the vocabulary of {self.transformer.vocab_size} tokens")
        if self.draft_vocab is not None and not 1 <= self.draft_vocab <= self.transformer.vocab_size:
            raise ValueError(f"draft_vocab must be between 1 and {self.transformer.vocab_size}, got {self.draft_vocab}")

    @property
    def first_slot(self) -> int:
        """First slot that yields a draft."""
        return 1 if self.layout == "same_position" else 0

    @property
    def num_drafts(self) -> int:
        return self.block_size - self.first_slot


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Evenly spread layers from 1 to N - 3, the choice of DFlash and its relatives (layer ids are 0-based outputs)."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
