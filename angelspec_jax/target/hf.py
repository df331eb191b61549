"""Hugging Face directories: config.json in its older and its transformers-5 form, end-of-sequence ids and chat templates."""

import json
from pathlib import Path

from angelspec_jax.target import torch_io
from angelspec_jax.target.config import MoEConfig, Rope, TransformerConfig
from angelspec_jax.target.layout import TensorSource
from angelspec_jax.target.safetensors_io import Checkpoint, open_checkpoint
from angelspec_jax.target.torch_io import PickledCheckpoint
from angelspec_jax.tokenizer import read_settings

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "HYV3ForCausalLM": "hy_v3",
}
QK_NORMS = {"qwen3": "before_rope", "qwen3_moe": "before_rope", "hy_v3": "before_rope", "hunyuan_v1_moe": "after_rope"}
MOST_LAYERS = 10_000
ROPE_KINDS = ("default", "linear", "llama3")


def read_config(directory: str | Path) -> tuple[TransformerConfig, tuple[int, ...]]:
    """The architecture and every end-of-sequence id of a model directory. Raises ValueError with one sentence when it is not supported."""
    directory = Path(directory)
    file = directory / "config.json"
    values = read_json(file)
    config = parse_config(values, file)
    generation = directory / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    where = file if eos is None else generation
    eos = values.get("eos_token_id") if eos is None else eos
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token in ids:
        if type(token) is not int or not 0 <= token < config.vocab_size:
            raise ValueError(f"{where}: eos_token_id {token!r} is not a token of a vocabulary of {config.vocab_size}")
    return config, tuple(dict.fromkeys(ids))


def parse_config(values: dict, file: str | Path) -> TransformerConfig:
    """config.json -> TransformerConfig. `file` is named in errors."""
    family = _family(values, file)
    if _count(values, "num_hidden_layers", file) > MOST_LAYERS:
        raise ValueError(f"{file}: num_hidden_layers {values['num_hidden_layers']} is more than any model has; the file is corrupt")
    hidden, heads, layers = (_count(values, key, file) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim_key = "head_dim" if values.get("head_dim") is not None else "attention_head_dim"  # the second in older Hunyuan files
    head_dim = _count(values, head_dim_key, file, hidden // heads)
    if values.get(head_dim_key) is None and hidden % heads:
        raise ValueError(f"{file}: hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}) and head_dim is not given")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{file}: hidden_act {values['hidden_act']!r} is not supported; only silu is")
    if values.get("quantization_config") is not None:
        raise ValueError(f"{file}: the weights are quantized (quantization_config), which is not supported; use the unquantized checkpoint")
    if (values.get("attention_bias") and family != "qwen2") or values.get("mlp_bias"):
        raise ValueError(f"{file}: attention_bias and mlp_bias add biases to the output projections, which is not supported for {family}")
    try:
        return TransformerConfig(
            vocab_size=_count(values, "vocab_size", file),
            hidden_size=hidden,
            intermediate_size=_count(values, "intermediate_size", file),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=_count(values, "num_key_value_heads", file, heads if family == "llama" else None),
            head_dim=head_dim,
            rope=parse_rope(values, file),
            rms_norm_eps=_number(values, "rms_norm_eps", file, 1e-6),
            qk_norm=QK_NORMS.get(family),
            attention_bias=family == "qwen2",
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            sliding_window=_sliding_window(values, layers, file),
            max_positions=_count(values, "max_position_embeddings", file, 2048),
            moe=MOE[family](values, layers, file) if family in MOE else None,
        )
    except ValueError as error:
        raise error if str(file) in str(error) else ValueError(f"{file}: {error}") from None


def parse_rope(values: dict, file: str | Path) -> Rope:
    """Rotary embedding from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older); they must agree."""
    new, old = values.get("rope_parameters"), values.get("rope_scaling")
    for name, part in (("rope_parameters", new), ("rope_scaling", old)):
        if part is not None and not isinstance(part, dict):
            raise ValueError(f"{file}: {name} should be an object or null, not {part!r}")
    if new and any(isinstance(value, dict) for value in new.values()):
        raise ValueError(f"{file}: rope_parameters differs between kinds of layers, which is not supported")
    forms = []
    if new is not None:
        forms.append(_rope(new, {"rope_theta": values.get("rope_theta", 10000.0)} | new, file))
    if new is None or old is not None:
        theta = {"rope_theta": values.get("rope_theta", (new or {}).get("rope_theta", 10000.0))}
        forms.append(_rope(old or {}, (old or {}) | theta, file))
    if new is not None and values.get("rope_theta") is not None and new.get("rope_theta", values["rope_theta"]) != values["rope_theta"]:
        raise ValueError(f"{file}: rope_theta is {values['rope_theta']} and {new['rope_theta']} in rope_parameters; remove the wrong one")
    if len(set(forms)) > 1:
        raise ValueError(f"{file}: rope_parameters and rope_scaling contradict each other; remove the wrong one")
    return forms[0]


def parse_qwen3_moe(values: dict, layers: int, file: str | Path) -> MoEConfig:
    """Experts of Qwen3-MoE; `mlp_only_layers` and `decoder_sparse_step` say which layers have none."""
    only, step = values.get("mlp_only_layers") or [], _count(values, "decoder_sparse_step", file, 1)
    if not isinstance(only, list) or any(type(index) is not int for index in only):
        raise ValueError(f"{file}: mlp_only_layers should be a list of layer ids, not {only!r}")
    return MoEConfig(
        num_experts=_same(values, ("num_experts", "num_local_experts"), layers, file),
        experts_per_token=_count(values, "num_experts_per_tok", file),
        intermediate_size=_count(values, "moe_intermediate_size", file),
        normalize=_switch(values, "norm_topk_prob", file, False),
        dense_layers=tuple(index for index in range(layers) if index in only or (index + 1) % step),
    )


def parse_hunyuan_v1_moe(values: dict, layers: int, file: str | Path) -> MoEConfig:
    """Experts of Hunyuan-V1. Older files give some fields once a layer; they must then all be equal."""
    for key, only in {"use_qk_norm": True, "use_mixed_mlp_moe": True, "norm_topk_prob": True, "use_cla": False}.items():
        if _switch(values, key, file, only) != only:
            raise ValueError(f"{file}: {key}={values[key]} is not supported for Hunyuan-V1")
    if values.get("moe_layer_num_skipped"):
        raise ValueError(f"{file}: moe_layer_num_skipped={values['moe_layer_num_skipped']} is not supported; it should be 0")
    width = _same(values, ("moe_intermediate_size", "intermediate_size"), layers, file, first=True)
    return MoEConfig(
        num_experts=_same(values, ("num_experts", "num_local_experts"), layers, file),
        experts_per_token=_same(values, ("moe_topk", "num_experts_per_tok"), layers, file),
        intermediate_size=width,
        shared_size=width * (_same(values, ("num_shared_expert",), layers, file) if values.get("num_shared_expert") is not None else 1),
        names="hunyuan",
    )


def parse_hy_v3(values: dict, layers: int, file: str | Path) -> MoEConfig:
    """Experts of Hy3, in the form of the released files (`first_k_dense_replace`) or of transformers (`mlp_layer_types`)."""
    if not _switch(values, "qk_norm", file, True):
        raise ValueError(f"{file}: qk_norm=false is not supported for Hy3")
    kinds = values.get("mlp_layer_types")
    if kinds is None:
        first = _integer(values, "first_k_dense_replace", file, 1)
        kinds = ["dense"] * min(max(first, 0), layers) + ["sparse"] * (layers - first)
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
        raise ValueError(f"{file}: mlp_layer_types should name {layers} layers, each dense or sparse")
    width = _same(values, ("moe_intermediate_size", "expert_hidden_dim"), layers, file)
    return MoEConfig(
        num_experts=_same(values, ("num_experts", "num_local_experts"), layers, file),
        experts_per_token=_count(values, "num_experts_per_tok", file),
        intermediate_size=width,
        shared_size=width * max(_integer(values, "num_shared_experts", file, 1), 0),
        scores="sigmoid" if _switch(values, "moe_router_use_sigmoid", file, True) else "softmax",
        selection_bias=_switch(values, "moe_router_enable_expert_bias", file, True),
        normalize=_switch(values, "route_norm", file, True),
        scale=_number(values, "router_scaling_factor", file),
        dense_layers=tuple(index for index, kind in enumerate(kinds) if kind == "dense"),
        names="hy3",
    )


MOE = {"qwen3_moe": parse_qwen3_moe, "hunyuan_v1_moe": parse_hunyuan_v1_moe, "hy_v3": parse_hy_v3}


def read_chat_template(directory: str | Path) -> str | None:
    """chat_template.jinja, else the (default) template of tokenizer_config.json, else None."""
    directory = Path(directory)
    own_file = directory / "chat_template.jinja"
    if own_file.exists():
        return own_file.read_text("utf-8")
    template = read_settings(directory).get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def open_tensors(directory: str | Path) -> Checkpoint | PickledCheckpoint:
    """The weights of a model directory, headers checked, nothing read yet. Pickled ones only where there are no others."""
    directory = Path(directory)
    pickled = torch_io.find(directory)
    if pickled is not None and not list(directory.glob("*.safetensors*")):
        return torch_io.open_pickled(pickled)
    return open_checkpoint(directory)


def name_prefix(tensors: TensorSource) -> str:
    """What precedes `embed_tokens.weight`: "model." for a language model, nothing for a bare backbone."""
    return "" if "embed_tokens.weight" in tensors.names() else "model."


def read_json(file: Path) -> dict:
    """A JSON object from a file, or one sentence about what is wrong with it."""
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist; it is part of every Hugging Face model directory")
    try:
        values = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{file} should hold a JSON object, not {type(values).__name__}")
    return values


def _family(values: dict, file: str | Path) -> str:
    named = values.get("architectures") or []
    if not isinstance(named, list):
        raise ValueError(f"{file}: architectures should be a list of names, not {named!r}")
    known = [ARCHITECTURES[name] for name in named if isinstance(name, str) and name in ARCHITECTURES]
    if known:
        return known[0]
    if not named and values.get("model_type") in ARCHITECTURES.values():
        return values["model_type"]
    what = named or values.get("model_type")
    raise ValueError(f"{file}: architecture {what!r} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _rope(scaling: dict, values: dict, file: str | Path) -> Rope:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    hunyuan = kind == "dynamic" and scaling.get("alpha")
    if kind not in ROPE_KINDS and not hunyuan:
        raise ValueError(f"{file}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}, and dynamic with alpha")
    if values.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"{file}: partial_rotary_factor is not supported; whole heads are rotated")
    theta = _number(values, "rope_theta", file)
    if kind == "default":
        return Rope(theta)
    if hunyuan:  # a larger base at every length; the other fields take no part
        return Rope(theta, "ntk", _number(values, "alpha", file))
    factor = _number(values, "factor", file)
    if kind == "linear":
        return Rope(theta, "linear", factor)
    low, high = _number(values, "low_freq_factor", file), _number(values, "high_freq_factor", file)
    if low >= high:
        raise ValueError(f"{file}: low_freq_factor ({low}) must be smaller than high_freq_factor ({high})")
    return Rope(theta, "llama3", factor, low, high, _count(values, "original_max_position_embeddings", file))


def _sliding_window(values: dict, layers: int, file: str | Path) -> int | None:
    """One window for all layers or none; a mixture is refused."""
    kinds = values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ValueError(f"{file}: layer_types should name {layers} layers, one each")
        sliding = kinds.count("sliding_attention")
        if sliding + kinds.count("full_attention") != layers:
            found = sorted(set(map(str, kinds)))
            raise ValueError(f"{file}: layer_types holds {found}; only full_attention and sliding_attention are supported")
    elif values.get("use_sliding_window"):
        full = _integer(values, "max_window_layers", file, 0)  # the first layers attend to everything
        sliding = max(layers - full, 0)
    else:
        sliding = 0
    if sliding == 0:
        return None
    if sliding < layers:
        raise ValueError(f"{file}: {sliding} of {layers} layers use a sliding window; a mixture is not supported")
    return _count(values, "sliding_window", file)


def _same(values: dict, keys: tuple[str, ...], layers: int, file: str | Path, *, first: bool = False) -> int:
    """A count that has several names or is given once a layer. All that are there must agree; with `first` the first name there decides."""
    there = [key for key in keys if values.get(key) is not None] or [keys[0]]
    found = {}
    for key in there[:1] if first else there:
        per_layer = values[key] if isinstance(values.get(key), list) else [values.get(key)]
        if len(per_layer) not in (1, layers) and len(per_layer) < layers:
            raise ValueError(f"{file}: {key} should be one number or {layers}, one a layer")
        found |= {_count({key: value}, key, file): key for value in per_layer[:layers]}
    if len(found) > 1:
        raise ValueError(f"{file}: {' and '.join(there)} should be one number for all layers, not {sorted(found)}")
    return next(iter(found))


def _switch(values: dict, key: str, file: str | Path, default: bool) -> bool:
    value = default if values.get(key) is None else values[key]
    if not isinstance(value, bool):
        raise ValueError(f"{file}: {key} should be true or false, not {value!r}")
    return value


def _count(values: dict, key: str, file: str | Path, default: int | None = None) -> int:
    value = _integer(values, key, file, default)
    if value < 1:
        raise ValueError(f"{file}: {key} must be at least 1, not {value}")
    return value


def _integer(values: dict, key: str, file: str | Path, default: int | None = None) -> int:
    value = default if values.get(key) is None else values[key]
    if value is None:
        raise ValueError(f"{file} does not say {key}, which the architecture needs")
    if type(value) is not int or abs(value) >= 2**31:
        raise ValueError(f"{file}: {key} should be an integer, not {value!r}")
    return value


def _number(values: dict, key: str, file: str | Path, default: float | None = None) -> float:
    value = default if values.get(key) is None else values[key]
    if value is None:
        raise ValueError(f"{file} does not say {key}, which the architecture needs")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{file}: {key} should be a positive number, not {value!r}")
    return float(value)
