"""Run configs: frozen dataclasses filled from YAML and dotted `key=value` overrides.

`load("train/smollm2_dfly", ["train.steps=100"])` finds the packaged file configs/train/smollm2_dfly.yaml; a path works as well. A file may
start from another one with `base: NAME_OR_PATH`, and `${section.key}` refers to another value. A key that does not exist, a value of the
wrong type and a value outside its range are refused with one sentence.
"""

import dataclasses
import difflib
import importlib.resources
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from angelspec_jax.target.config import MoEConfig
from angelspec_jax.training.objective import Objective

Config = TypeVar("Config")

FLAT = {"flat": True}  # field metadata: the fields of this dataclass are written directly in its parent's mapping


def _positive(section, *names: str) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True)
class TargetSection:
    """The frozen language model."""

    source: str  # a Hugging Face directory, a GGUF file, or a name that `target.loading.load_target` knows
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantize: Literal["int8"] | None = None  # the layers' matrices in 8 bits: the drafter learns the rounded model


@dataclasses.dataclass(frozen=True)
class DrafterSection:
    """The drafter to train; None means "as the target has it"."""

    family: Literal["dflash", "dflare", "dfly", "dspark", "mtp", "mtp_moe", "eagle3"] = "dfly"
    layers: int = 3  # of a block drafter; autoregressive ones have one
    block_size: int = 8
    taps: int | tuple[int, ...] | None = None  # how many, evenly spread, or the layer ids; None: 5, or EAGLE-3's three
    layout: Literal["same_position", "anchor_first"] = "same_position"
    mask_token: int | str = 0  # id, or the text of a special token
    draft_vocab: int | None = None  # rows of a frequency-ranked head; None scores the whole vocabulary
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    # Parts of a block drafter that differ from its family's.
    context: Literal["fc", "fusion", "fc_fusion", "gated_sum"] | None = None
    head: Literal["none", "hidden_correction", "markov_vanilla", "markov_gated", "markov_rnn"] | None = None
    confidence: Literal["none", "hidden", "hidden_markov"] | None = None  # a trained head; none: the drafter's own probability
    correction_size: int | None = None
    rank: int | None = None  # of a Markov head; None: 256
    # "target": draft layers start as evenly spread target layers, an autoregressive one as the last, or as the target's own MTP module;
    # a folder: as the drafter saved there
    init: str = "random"
    drafts: int = 4  # autoregressive families: most drafts a round
    qk_norm: bool | None = None  # autoregressive families; None: MTP as the target has it, EAGLE-3 without
    input_postnorm: bool = True  # MTP reads the target's hidden state after its final norm (as it is served), or the last layer's output
    moe: MoEConfig | None = None  # experts of mtp_moe; None: as the target has them
    fc_norm: bool = False  # EAGLE-3: a norm on every tapped feature
    feedback_norm: bool = False  # EAGLE-3: the next step reads the normed output (AngelSpec's norm_output)
    own_head: bool = True  # EAGLE-3: a head of its own, or the target's (DeepSpec)

    def __post_init__(self):
        _positive(self, "layers", "heads", "kv_heads", "head_dim", "intermediate_size", "correction_size", "rank", "draft_vocab", "drafts")
        if isinstance(self.taps, int):
            _positive(self, "taps")
        if not 2 <= self.block_size <= 64:
            raise ValueError(f"block_size must be between 2 and 64, got {self.block_size}")


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Conversations, and how they become token sequences."""

    paths: str | tuple[str, ...]  # JSONL or JSONL.gz files
    validation_modulus: int = 20  # conversations with id % modulus == 0 are held out; 0 holds out none
    max_length: int = 512  # S: every sequence is padded to this many tokens
    overlong: Literal["drop", "truncate", "split"] = "drop"  # what happens to longer conversations; the number is reported
    min_supervised: int = 2  # sequences with fewer supervised tokens are left out (and counted)
    domains: tuple[str, ...] | None = None  # None takes all
    template: dict[str, Any] = dataclasses.field(default_factory=dict)  # switches of the chat template, such as enable_thinking
    last_turn_only: bool = False  # supervise the last answer of a conversation only
    cache: str | None = None  # folder of the target's features; None computes them in every step
    seed: int = 0  # of the order of the sequences

    def __post_init__(self):
        _positive(self, "max_length", "min_supervised")
        if not self.files:
            raise ValueError("paths must name at least one file")
        if self.validation_modulus < 0:
            raise ValueError(f"validation_modulus must be 0 (nothing held out) or more, got {self.validation_modulus}")

    @property
    def files(self) -> tuple[str, ...]:
        return (self.paths,) if isinstance(self.paths, str) else self.paths


@dataclasses.dataclass(frozen=True)
class Stage:
    """One objective, in force until this fraction of the run."""

    until: float = 1.0
    objective: Objective = dataclasses.field(default_factory=Objective, metadata=FLAT)


@dataclasses.dataclass(frozen=True)
class TTTSection:
    """Test-time training of autoregressive drafters, see training.ttt."""

    steps: int | None = None  # of every chain; None: as many as the drafter drafts a round
    on_policy: bool = False  # steps after the first read what the drafter says, not what stands there
    mask: Literal["label", "input"] = "label"  # whose supervision counts; "input" repeats published EAGLE-3 recipes

    def __post_init__(self):
        _positive(self, "steps")


@dataclasses.dataclass(frozen=True)
class OptimizationSection:
    """How the drafter is trained."""

    steps: int = 10_000
    batch_size: int = 8  # sequences a step, over all processes
    max_documents: int = 1  # conversations that may share a row of data.max_length tokens, isolated from each other; 1: no packing
    anchors: int = 32  # A: blocks per row
    anchor_rule: Literal["label", "anchor", "both"] = "label"  # where blocks may start, see training.anchors
    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup: float = 0.04  # fraction of the steps
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: matrices by Muon, the rest by AdamW, see training.optimizer
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    decay: float = 0.2  # wsd: the last fraction of the steps, in which the rate falls
    accumulate: int = 1  # parts a batch is worked through in, whose gradients are averaged
    freeze: tuple[str, ...] = ()  # parameters that keep their value, such as context or layers.0
    clip_norm: float | None = 1.0
    ema: float | None = None  # decay of averaged parameters, which are exported instead of the last ones
    stages: tuple[Stage, ...] = (Stage(),)
    ttt: TTTSection = TTTSection()
    chunk: int = 1024  # rows of vocabulary logits alive at once
    compute_dtype: Literal["float32", "bfloat16"] = "float32"  # parameters stay float32
    save_every: int = 500
    keep: int = 2
    log_every: int = 10
    seed: int = 0

    def __post_init__(self):
        _positive(self, "steps", "batch_size", "anchors", "chunk", "save_every", "keep", "log_every", "accumulate", "max_documents")
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size {self.batch_size} must be a multiple of accumulate ({self.accumulate})")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay is a fraction of the steps, above 0 and at most 1, got {self.decay}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ValueError(f"min_learning_rate must be between 0 and learning_rate ({self.learning_rate}), got {self.min_learning_rate}")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is a fraction of the steps, at least 0 and below 1, got {self.warmup}")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be above 0, or null for no clipping, got {self.clip_norm}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema must be between 0 and 1, or null for none, got {self.ema}")
        ends = [stage.until for stage in self.stages]
        if not ends or ends[-1] != 1.0 or ends[0] <= 0 or sorted(set(ends)) != ends:
            raise ValueError(f"the `until` of the stages must be rising fractions that end at 1.0, got {ends}")

    def stage_ends(self) -> tuple[int, ...]:
        """The step before which each stage is in force."""
        return tuple(round(stage.until * self.steps) for stage in self.stages)


@dataclasses.dataclass(frozen=True)
class EvaluationSection:
    """What is measured during the run, on held-out conversations."""

    every: int = 500  # steps; 0 = never
    batches: int = 8  # of validation loss and simulated tau
    prompts: int = 4  # per domain, decoded speculatively for real; 0 = none
    max_new_tokens: int = 64
    tensorboard: bool = False  # also write TensorBoard events, in the run's folder
    tolerance: float = 0.25  # warn when served and simulated tau part by more than this share of it


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """Devices per mesh axis; one of them may be -1 and takes what is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    sequence: int = 1  # devices that share the tokens of a sequence: long texts, MTP and EAGLE-3 only

    def __post_init__(self):
        for name in ("data", "fsdp", "tensor", "sequence"):
            if getattr(self, name) != -1:
                _positive(self, name)


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """A training run, from target to exported drafter."""

    target: TargetSection
    data: DataSection
    output: str  # the run's folder: checkpoints, metrics.jsonl, the exported drafter
    drafter: DrafterSection = DrafterSection()
    train: OptimizationSection = OptimizationSection()
    evaluation: EvaluationSection = EvaluationSection()
    mesh: MeshSection = MeshSection()
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"


def load(name: str | Path, overrides: Sequence[str] = (), schema: type[Config] = TrainConfig) -> Config:
    """The config of a YAML file (a path, or the name of a packaged one) with `a.b=value` overrides applied.

    Raises FileNotFoundError for a missing file and ValueError with one sentence for everything else that is wrong.
    """
    path = find(name)
    values = _read(path, ())
    for text in overrides:
        _override(values, text)
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {_first_line(error)}") from error
    return build(schema, resolved, str(path))


def build(schema: type[Config], values: Mapping, origin: str) -> Config:
    """A config dataclass from nested mappings; `origin` names the source in messages."""
    return _convert(schema, values, "", origin)


def as_dict(config) -> dict:
    """The nested mapping that `build` turns into an equal config."""
    result = {}
    for field in dataclasses.fields(config):
        value = _plain(getattr(config, field.name))
        if field.metadata.get("flat"):
            result.update(value)
        else:
            result[field.name] = value
    return result


def to_json(config) -> str:
    return json.dumps(as_dict(config), indent=2)


def find(name: str | Path) -> Path:
    """Path of a config: an existing file, or a packaged config by its name without `.yaml`."""
    path = Path(name)
    if path.is_file():
        return path
    root = packaged()
    inside = root / f"{name}.yaml" if path.suffix != ".yaml" else root / name
    if inside.is_file():
        return inside
    names = sorted(str(p.relative_to(root).with_suffix("")) for p in root.rglob("*.yaml")) if root.is_dir() else []
    raise FileNotFoundError(f"config {str(name)!r} is neither a file nor a packaged config{_nearest(str(name), names)}")


def packaged() -> Path:
    """The folder of packaged configs: beside the package in a checkout, inside it once installed from a wheel."""
    package = Path(str(importlib.resources.files("angelspec_jax")))
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _read(path: Path, seen: tuple[Path, ...]) -> dict:
    if path.resolve() in seen:
        raise ValueError(f"{path}: `base` leads back to this file")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {_first_line(error)}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of sections, found {_kind(values)}")
    base = values.pop("base", None)
    if base is None:
        return values
    beside = path.parent / str(base)
    parent = _read(beside if beside.is_file() else find(base), (*seen, path.resolve()))
    return _merge(parent, values)


def _merge(base: dict, top: dict) -> dict:
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _override(values: dict, text: str) -> None:
    key, equals, _ = text.partition("=")
    if not equals or not key.strip():
        raise ValueError(f"override {text!r} must look like section.key=value")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text[len(key) + 1 :]}"]))
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"override {text!r} has a value that is not valid YAML: {_first_line(error)}") from error
    parts = key.strip().split(".")
    place: Any = values
    for depth, part in enumerate(parts):
        entry = _entry(place, part, ".".join(parts[:depth]), text)
        if depth == len(parts) - 1:
            place[entry] = parsed["value"]
            return
        if isinstance(place, dict) and place.get(part) is None:
            place[part] = {}
        place = place[entry]


def _entry(place, part: str, where: str, text: str) -> Any:
    """`part` as a key or index of the mapping or list `place`, which is found at `where`."""
    if isinstance(place, dict):
        return part
    if not isinstance(place, list):
        raise ValueError(f"override {text!r}: {where} is {_kind(place)}, which has no key {part!r}")
    if not part.isdigit() or int(part) >= len(place):
        raise ValueError(f"override {text!r}: {where} is a list of {len(place)}, so {part!r} must be an index below that")
    return int(part)


def _convert(kind, value, key: str, origin: str) -> Any:
    """`value` as type `kind`; `key` is its dotted name."""
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, key, origin)
    form, options = typing.get_origin(kind), typing.get_args(kind)
    if form is Literal:
        if value in options:
            return value
        raise ValueError(f"{origin}: {key} must be one of {', '.join(map(str, options))}, got {value!r}")
    if form in (Union, types.UnionType):
        return _convert_union(kind, options, value, key, origin)
    if form is tuple and isinstance(value, list | tuple):
        if options[-1] is not Ellipsis and len(value) != len(options):
            raise ValueError(f"{origin}: {key} must be a list of {len(options)} values, got {len(value)}")
        kinds = (options[0],) * len(value) if options[-1] is Ellipsis else options
        return tuple(_convert(k, v, f"{key}.{i}", origin) for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if form is dict and isinstance(value, dict):
        return dict(value)
    if kind is Any or (_is_plain(kind) and type(value) is kind):
        return value
    if kind is float and type(value) is int:
        return float(value)
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    raise ValueError(f"{origin}: {key} must be {_expected(kind)}, got {_kind(value)}")


def _convert_union(kind, options, value, key, origin):
    if value is None and type(None) in options:
        return None
    shaped = [o for o in options if o is not type(None) and (typing.get_origin(o) is tuple) == isinstance(value, list | tuple)]
    if len(shaped) == 1:
        return _convert(shaped[0], value, key, origin)
    for option in shaped:
        try:
            return _convert(option, value, key, origin)
        except ValueError:
            continue
    raise ValueError(f"{origin}: {key} must be {_expected(kind)}, got {_kind(value)}")


def _convert_dataclass(kind, value, key, origin):
    if not isinstance(value, Mapping):
        raise ValueError(f"{origin}: {key or 'the config'} must be a mapping, got {_kind(value)}")
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    flat = [name for name, field in fields.items() if field.metadata.get("flat")]
    inner = {name: {f.name for f in dataclasses.fields(hints[name])} for name in flat}
    allowed = (set(fields) - set(flat)).union(*inner.values())
    for name in value:
        if name not in allowed:
            dotted = f"{key}.{name}" if key else str(name)
            raise ValueError(f"{origin}: unknown key {dotted}{_nearest(str(name), sorted(allowed), key)}")
    arguments = {}
    for name, field in fields.items():
        dotted = f"{key}.{name}" if key else name
        if name in inner:
            arguments[name] = _convert(hints[name], {k: v for k, v in value.items() if k in inner[name]}, key, origin)
        elif name in value:
            arguments[name] = _convert(hints[name], value[name], dotted, origin)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            if not dataclasses.is_dataclass(hints[name]):
                raise ValueError(f"{origin}: {dotted} is missing; add it to the file or pass {dotted}=VALUE")
            arguments[name] = _convert(hints[name], {}, dotted, origin)
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{origin}: {key + ': ' if key else ''}{error}") from error


def _plain(value):
    if dataclasses.is_dataclass(value):
        return as_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _nearest(name: str, names: Sequence[str], section: str = "") -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    if close:
        return f"; did you mean {section + '.' if section else ''}{close[0]}?"
    return f"; valid names are {', '.join(names)}" if names else ""


def _is_plain(kind) -> bool:
    return kind in (str, int, float, bool)


def _expected(kind) -> str:
    words = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    if kind in words:
        return words[kind]
    if typing.get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_expected(option) for option in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "a list"
    return "a mapping"


def _kind(value) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list | tuple) else repr(value)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
