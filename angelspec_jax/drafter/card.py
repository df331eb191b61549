"""The drafter's card: which target it was trained for and how, kept in its config.json under "angelspec_jax".

A drafter for another target does not crash, it is merely wrong most of the time. The card lets a mismatch be a sentence instead.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

KEY = "angelspec_jax"


@dataclasses.dataclass(frozen=True)
class DrafterCard:
    """What is known about a drafter; None means not recorded (checkpoints of other projects record little)."""

    target_name: str | None = None
    target_fingerprint: str | None = None  # of the target's weights
    target_num_layers: int | None = None
    target_hidden_size: int | None = None
    target_vocab_size: int | None = None
    chat_template_sha256: str | None = None
    thinking: str | None = None  # thinking mode of the training answers, "on" or "off"; None also where the template has no such switch
    mask_token: int | None = None
    data: str | None = None  # what it was trained on
    command: str | None = None  # how to train it again
    steps: int | None = None
    seconds: float | None = None  # training time
    tau: Mapping[str, float] | None = None  # domain -> emitted tokens per round on prompts not trained on
    speedup: Mapping[str, float] | None = None  # domain -> tokens per second over plain decoding
    notes: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys of a newer version, kept as they are

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; what is not recorded is left out."""
        known = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        known = {name: dict(value) if isinstance(value, Mapping) else value for name, value in known.items() if value is not None}
        return known | dict(self.extra)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> "DrafterCard":
        """Inverse of `to_dict`. ValueError when a field holds another type than the card declares."""
        data = data or {}
        if not isinstance(data, Mapping):
            raise ValueError(f'config.json: "{KEY}" must be an object, got {type(data).__name__}')
        known = {name: value for name, value in data.items() if name in FIELD_TYPES}
        for name, value in known.items():
            accepted = FIELD_TYPES[name]
            if value is not None and (not isinstance(value, accepted) or isinstance(value, bool)):
                raise ValueError(f'config.json: field "{name}" of the drafter card must be {accepted[0].__name__}, got {value!r}')
        return cls(**known, extra={name: value for name, value in data.items() if name not in FIELD_TYPES})


FIELD_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("target_name", "target_fingerprint", "chat_template_sha256", "thinking", "data", "command", "notes"), (str,)),
    **dict.fromkeys(("target_num_layers", "target_hidden_size", "target_vocab_size", "mask_token", "steps"), (int,)),
    "seconds": (float, int),
    **dict.fromkeys(("tau", "speedup"), (dict,)),
}


def template_digest(template: str | None) -> str | None:
    """SHA-256 of a chat template; None without one."""
    return None if template is None else hashlib.sha256(template.encode()).hexdigest()


def card_for(target, config, **facts: Any) -> DrafterCard:
    """A card that names `target` (it has `config`, `name`, `fingerprint` and `chat_template`), with further facts by field name."""
    return DrafterCard(
        target_name=target.name,
        target_fingerprint=target.fingerprint,
        target_num_layers=target.config.num_layers,
        target_hidden_size=target.config.hidden_size,
        target_vocab_size=target.config.vocab_size,
        chat_template_sha256=template_digest(target.chat_template),
        mask_token=mask_token(config),
        **facts,
    )


def check_target(
    config, card: DrafterCard, target, *, thinking: str | None = None, allow_template_mismatch: bool = False
) -> None:
    """Raise ValueError with one sentence when the drafter cannot serve `target`, or was trained for another use of it.

    `target` has `config`, `name` and `chat_template`; `thinking` is the thinking mode it will be used in, where that is known.
    """
    check_shapes(config, target)
    if allow_template_mismatch:
        return
    remedy = "pass allow_template_mismatch=True to use it all the same, at the price of fewer accepted tokens"
    trained, present = card.chat_template_sha256, template_digest(target.chat_template)
    if trained is not None and present is not None and trained != present:
        raise ValueError(
            f"the drafter was trained on another chat template (sha256 {trained[:12]}) than {target.name} has ({present[:12]}); {remedy}"
        )
    if card.thinking is not None and thinking is not None and card.thinking != thinking:
        raise ValueError(f"the drafter was trained with thinking {card.thinking} but {target.name} runs with thinking {thinking}; {remedy}")


def check_shapes(config, target) -> None:
    """Raise ValueError when width, depth, vocabulary or mask token of drafter and target disagree; no setting can mend these."""
    ours, theirs = config.transformer, target.config
    if ours.hidden_size != theirs.hidden_size:
        raise ValueError(
            f"the drafter is {ours.hidden_size} wide but target {target.name} is {theirs.hidden_size} wide; it was made for another target"
        )
    if config.target_num_layers != theirs.num_layers:
        raise ValueError(
            f"the drafter reads layers {list(config.taps)} of a target of {config.target_num_layers} layers, "
            f"but {target.name} has {theirs.num_layers}; it was made for another target"
        )
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"the drafter's vocabulary has {ours.vocab_size} tokens but that of {target.name} has {theirs.vocab_size}; "
            "it was made for another target"
        )
    token = mask_token(config)
    if token is not None and not 0 <= token < theirs.vocab_size:
        raise ValueError(f"mask token {token} is outside the {theirs.vocab_size} tokens of {target.name}; name another with mask_token=")


def mask_token(config) -> int | None:
    """What fills the open slots of a block; an autoregressive drafter has none."""
    return getattr(config, "mask_token", None)
