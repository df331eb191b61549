"""What a block drafter is: context conditioning x backbone x sequential head x confidence."""

import dataclasses
from typing import NamedTuple

from angelspec_jax.target.config import TransformerConfig

CONTEXTS = ("fc", "fusion", "fc_fusion", "gated_sum")
MARKOV_HEADS = ("markov_vanilla", "markov_gated", "markov_rnn")
HEADS = (None, "hidden_correction", *MARKOV_HEADS)
CONFIDENCES = (None, "hidden", "hidden_markov")
LAYOUTS = ("same_position", "anchor_first")


class Parts(NamedTuple):
    """What a family is composed of."""

    context: str
    head: str | None = None
    separate_kv: bool = False
    confidence: str | None = None


FAMILIES = {
    "dflash": Parts("fc"),
    "dflare": Parts("fusion", separate_kv=True),
    "dfly": Parts("fc_fusion", "hidden_correction"),
    "dspark": Parts("fc", "markov_vanilla", confidence="hidden_markov"),
}
DEFAULT_RANK = 256  # of DSpark's Markov heads


def family_of(parts: Parts) -> str:
    """The family that a composition belongs to."""
    if parts.context == "fc_fusion" or parts.head == "hidden_correction":
        return "dfly"
    if parts.context == "fusion":
        return "dflare"
    return "dspark" if parts.head in MARKOV_HEADS or parts.confidence else "dflash"


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
    separate_kv: bool = False  # context keys and values by projections of their own (DFlare)
    gate_temperature: float = 1.0  # of the gated sum of target layers
    head: str | None = None
    correction_size: int | None = None  # hidden width of the correction; None = hidden_size
    rank: int | None = None  # of a Markov head
    confidence: str | None = None  # trained head that foretells acceptance; None = the drafter's own probability
    confidence_temperatures: tuple[float, ...] = ()  # sequential temperature scaling, one per draft; empty = none
    draft_vocab: int | None = None  # rows of the frequency-ranked draft head; None = the target's whole vocabulary

    def __post_init__(self):
        for name, known in (("layout", LAYOUTS), ("context", CONTEXTS), ("head", HEADS), ("confidence", CONFIDENCES)):
            if getattr(self, name) not in known:
                what = "block layout" if name == "layout" else name
                raise ValueError(f"{what} must be one of {', '.join(map(str, known))}, got {getattr(self, name)!r}")
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
        self._check_heads()

    def _check_heads(self):
        if (self.rank is not None) != self.markov or (self.rank is not None and self.rank < 1):
            raise ValueError(f"a Markov head, and no other, has a rank of at least 1; head={self.head} came with rank={self.rank}")
        if self.confidence == "hidden_markov" and not self.markov:
            raise ValueError(f"confidence hidden_markov reads the embeddings of a Markov head, but head={self.head}; use confidence=hidden")
        if self.separate_kv and self.transformer.attention_bias:
            raise ValueError("context projections of their own (separate_kv) have no biases; set attention_bias to false")
        if not self.gate_temperature > 0:
            raise ValueError(f"gate_temperature must be above 0, got {self.gate_temperature}")
        temperatures = self.confidence_temperatures
        if temperatures and (len(temperatures) != self.num_drafts or not all(0 < t < float("inf") for t in temperatures)):
            raise ValueError(f"confidence_temperatures must be {self.num_drafts} positive numbers, one per draft, got {list(temperatures)}")

    @property
    def markov(self) -> bool:
        """Whether the sequential head is one of the Markov heads."""
        return self.head in MARKOV_HEADS

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
