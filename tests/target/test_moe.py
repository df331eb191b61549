"""Mixture-of-experts targets: routing and grouped products against plain loops, spread experts, checkpoints in and out, config forms."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from angelspec_jax import mesh as meshes
from angelspec_jax.params import initialize
from angelspec_jax.target import hf, kv_cache, layout, moe
from angelspec_jax.target.attention import uniform_rows
from angelspec_jax.target.config import MoEConfig, Rope, TransformerConfig
from angelspec_jax.target.layers import Layer, rope_frequencies
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.moe import moe_specs, routed
from angelspec_jax.target.safetensors_io import open_checkpoint
from angelspec_jax.target.transformer import Runs, forward, layer_at, target_specs

QWEN3 = MoEConfig(num_experts=6, experts_per_token=2, intermediate_size=12, dense_layers=(1,))
HUNYUAN = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=12, shared_size=24, names="hunyuan")
HY3 = MoEConfig(
    num_experts=8, experts_per_token=3, intermediate_size=12, shared_size=12, scores="sigmoid", selection_bias=True, scale=2.5,
    dense_layers=(0,), names="hy3",
)  # fmt: skip
KINDS = {"qwen3": QWEN3, "hunyuan": HUNYUAN, "hy3": HY3, "weights_as_they_are": dataclasses.replace(QWEN3, normalize=False)}
WIDTH, ROWS = 16, 10


def model(experts: MoEConfig, scan_layers: bool = False) -> TransformerConfig:
    norm = "after_rope" if experts.names == "hunyuan" else "before_rope"
    return TransformerConfig(40, WIDTH, 24, 3, 4, 2, 8, qk_norm=norm, moe=experts, scan_layers=scan_layers)


FORMS = {
    "qwen3": ("Qwen3MoeForCausalLM", {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True, "mlp_only_layers": [1],
    }),
    "hunyuan": ("HunYuanMoEV1ForCausalLM", {
        "num_experts": 4, "moe_topk": [2] * 3, "moe_intermediate_size": [12] * 3, "num_shared_expert": [2] * 3,
    }),
    "hy3": ("HYV3ForCausalLM", {
        "num_experts": 8, "num_experts_per_tok": 3, "expert_hidden_dim": 12, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "router_scaling_factor": 2.5, "route_norm": True, "qk_norm": True,
        "moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True,
    }),
}  # fmt: skip


def layer(config: MoEConfig):
    """Random parameters and rows; biases large enough to change who is chosen."""
    params = initialize(moe_specs(config, WIDTH), jax.random.key(0))
    if config.selection_bias:
        params = params.replace(selection_bias=jax.random.normal(jax.random.key(1), (config.num_experts,)) / 4)
    return params, jax.random.normal(jax.random.key(2), (ROWS, WIDTH))


def by_loops(params, config: MoEConfig, x) -> np.ndarray:
    """One row and one expert at a time, in float64."""
    router, gate_up, down = (np.asarray(leaf, np.float64) for leaf in (params.router, params.gate_up, params.down))
    bias = np.zeros(config.num_experts) if params.selection_bias is None else np.asarray(params.selection_bias, np.float64)
    out = np.zeros(x.shape)
    for n, row in enumerate(np.asarray(x, np.float64)):
        raw = row @ router
        scores = 1 / (1 + np.exp(-raw)) if config.scores == "sigmoid" else np.exp(raw) / np.exp(raw).sum()
        chosen = np.argsort(-(scores + bias), kind="stable")[: config.experts_per_token]
        total = scores[chosen].sum() if config.normalize else 1.0
        for expert in chosen:
            gate, up = np.split(row @ gate_up[expert], 2)
            out[n] += config.scale * scores[expert] / total * ((gate / (1 + np.exp(-gate)) * up) @ down[expert])
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_rows_go_through_their_experts(kind):
    params, x = layer(KINDS[kind])
    out = jax.jit(routed, static_argnums=1)(params, KINDS[kind], x)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, by_loops(params, KINDS[kind], x), atol=1e-5)


def test_no_row_is_dropped_when_all_choose_one_expert():
    config = dataclasses.replace(HY3, experts_per_token=1)
    params, x = layer(config)
    params = params.replace(selection_bias=jnp.zeros(8).at[5].set(9.0))
    np.testing.assert_allclose(jax.jit(routed, static_argnums=1)(params, config, x), by_loops(params, config, x), atol=1e-5)


@pytest.mark.parametrize("way", [None, moe._among_all])
def test_experts_of_a_stack_are_those_of_their_layer(monkeypatch, way):
    """Read in place by an index, as a scan has them, with another layer's before and behind; also the way that TPUs go."""
    if way is not None:
        monkeypatch.setattr(moe, "_alone", way)
    params, x = layer(HY3)
    others = initialize(moe_specs(HY3, WIDTH), jax.random.key(7))
    stack, nothing = jax.tree.map(lambda *leaves: jnp.stack(leaves), others, params, others), [None] * 6
    sliced, complete = moe.aside(Layer(*nothing, moe=stack))
    assert sliced.moe.gate_up is None and sliced.moe.down is None
    found = jax.jit(lambda index: routed(complete(Layer(*nothing, moe=params), index).moe, HY3, x))(1)
    np.testing.assert_allclose(found, by_loops(params, HY3, x), atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize(("kind", "axes"), [("hy3", ("fsdp", "tensor")), ("qwen3", ("tensor",))])
def test_spread_experts_give_the_same_sums(kind, axes):
    config = KINDS[kind]
    params, x = layer(config)
    mesh = meshes.make_mesh(2, 2, 2, jax.devices()[:8])
    held = jax.device_put(params, meshes.shardings(mesh, moe_specs(config, WIDTH)))
    assert held.gate_up.sharding.spec == PartitionSpec(axes, None, None)
    rows = jax.device_put(x, meshes.sharding(mesh, ("batch", None), x.shape))
    with jax.set_mesh(mesh):
        compiled = jax.jit(routed, static_argnums=1).lower(held, config, rows).compile()
    np.testing.assert_allclose(compiled(held, rows), by_loops(params, config, x), atol=1e-5)
    local = config.num_experts // (4 if len(axes) == 2 else 2)
    assert f"f32[{local},{WIDTH}," in compiled.as_text() and f"f32[{config.num_experts},{WIDTH}," not in compiled.as_text()


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_loaded_model_gathers_no_expert(tmp_path, write_model, quantize):
    """The whole forward pass as callers trace it, without a word about the mesh: its program moves rows, not experts."""
    config = dataclasses.replace(model(HY3, scan_layers=True), head_dim=16)
    write_model(tmp_path, config, architectures=[FORMS["hy3"][0]], **FORMS["hy3"][1])
    mesh = meshes.make_mesh(2, 2, 2, jax.devices()[:8])
    alone, spread = (load_target(tmp_path, mesh=on, scan_layers=True, need_tokenizer=False, quantize=quantize) for on in (None, mesh))
    tokens = jnp.arange(ROWS, dtype=jnp.int32)

    def run(params, config, tokens):
        rows = uniform_rows(jnp.zeros(1, jnp.int32), ROWS, causal=True)
        return forward(params, config, tokens, jnp.arange(ROWS, dtype=jnp.int32), rows, kv_cache.create(config, 1, 16))[1]

    compiled = jax.jit(run, static_argnums=1).lower(spread.params, spread.config, jax.device_put(tokens, meshes.replicated(mesh))).compile()
    held = HY3.num_experts // 4
    dims = re.findall(r"\w+\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert not [shape for shape in dims if shape.startswith(f"{HY3.num_experts},{WIDTH},") or f",{HY3.num_experts},{WIDTH}," in shape]
    assert f"[{held},{WIDTH}," in compiled.as_text() or f",{held},{WIDTH}," in compiled.as_text()
    assert f"[{HY3.num_experts},{WIDTH}," not in compiled.as_text()
    out = jax.jit(run, static_argnums=1)(spread.params, spread.config, jax.device_put(tokens, meshes.replicated(mesh)))
    np.testing.assert_allclose(out, jax.jit(run, static_argnums=1)(alone.params, alone.config, tokens), atol=1e-4)


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_checkpoints_come_back(tmp_path, write_model, kind, scan_layers):
    config = model(KINDS[kind], scan_layers)
    architecture, fields = FORMS[kind]
    params = write_model(tmp_path, config, architectures=[architecture], **fields)
    target = load_target(tmp_path, scan_layers=scan_layers, need_tokenizer=False)
    assert target.config == config
    jax.tree.map(np.testing.assert_array_equal, target.params, params)
    if scan_layers and kind != "hunyuan":  # dense layers and others: a stack for each run of layers that are alike
        assert isinstance(target.params.layers, Runs)
        assert [run.input_norm.shape[0] for run in target.params.layers.stacks] == ([1, 1, 1] if kind == "qwen3" else [1, 2])
    last = layer_at(target.params.layers, 2)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    np.testing.assert_array_equal(last.moe.gate_up[3, :, 12:].T, open_checkpoint(tmp_path).read(name))


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
def test_each_device_gets_its_experts(tmp_path, write_model):
    config = model(HY3, scan_layers=True)
    params = write_model(tmp_path, config, architectures=[FORMS["hy3"][0]], **FORMS["hy3"][1])
    mesh = meshes.make_mesh(2, 2, 2, jax.devices()[:8])
    target = load_target(tmp_path, mesh=mesh, scan_layers=True, need_tokenizer=False)
    jax.tree.map(np.testing.assert_array_equal, target.params, params)
    gate_up = target.params.layers.stacks[1].moe.gate_up
    assert {shard.data.shape for shard in gate_up.addressable_shards} == {(2, 2, WIDTH, 24)}


def parse(kind: str, **changes) -> TransformerConfig:
    architecture, fields = FORMS[kind]
    base = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    base |= {"num_key_value_heads": 2, "head_dim": 8, "architectures": [architecture]}
    return hf.parse_config({key: value for key, value in (base | fields | changes).items() if value is not None}, "config.json")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"num_experts": None, "num_local_experts": 6}),
        ("qwen3", {"mlp_only_layers": [], "decoder_sparse_step": 1}),
        ("qwen3", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
        ("hunyuan", {"moe_topk": 2, "moe_intermediate_size": None, "num_shared_expert": None, "intermediate_size": 12}),
        ("hunyuan", {"head_dim": None, "attention_head_dim": 8}),
        ("hy3", {"first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
        ("hy3", {"expert_hidden_dim": None, "moe_intermediate_size": 12}),
    ],
)
def test_older_and_newer_forms_say_the_same(kind, changes):
    expected = parse(kind).moe
    if kind == "qwen3" and "decoder_sparse_step" in changes:
        expected = dataclasses.replace(expected, dense_layers=(0, 2) if changes["decoder_sparse_step"] == 2 else ())
    if "intermediate_size" in changes:  # without num_shared_expert one is shared
        expected = dataclasses.replace(expected, shared_size=12)
    assert parse(kind, **changes).moe == expected
    assert parse(kind, **changes).head_dim == 8


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3", {"num_experts_per_tok": 7}, "more than the 6 experts"),
        ("qwen3", {"num_experts": None}, "does not say num_experts"),
        ("qwen3", {"num_local_experts": 5}, "one number for all layers"),
        ("qwen3", {"norm_topk_prob": "yes"}, "norm_topk_prob should be true or false"),
        ("qwen3", {"mlp_only_layers": ["a"]}, "mlp_only_layers should be a list of layer ids"),
        ("hunyuan", {"moe_topk": [2, 2, 1]}, "one number for all layers"),
        ("hunyuan", {"moe_topk": [2, 2]}, "one number or 3, one a layer"),
        ("hunyuan", {"use_cla": True}, "use_cla=True is not supported"),
        ("hunyuan", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped=1 is not supported"),
        ("hy3", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types should name 3 layers"),
        ("hy3", {"router_scaling_factor": None}, "does not say router_scaling_factor"),
        ("hy3", {"qk_norm": False}, "qk_norm=false is not supported"),
    ],
)  # fmt: skip
def test_what_is_not_supported_gets_a_sentence(kind, changes, message):
    with pytest.raises(ValueError, match=f"config.json.*{message}"):
        parse(kind, **changes)


def test_a_gemma3_is_refused():
    with pytest.raises(ValueError, match="Gemma3ForCausalLM.*is not supported; supported are"):
        parse("qwen3", architectures=["Gemma3ForCausalLM"])


def test_hunyuan_enlarges_its_rotary_base():
    rope = parse("hunyuan", rope_theta=1e4, rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0}).rope
    assert rope == Rope(1e4, "ntk", 1000.0)
    np.testing.assert_allclose(rope_frequencies(rope, 8), (1e4 * 1000 ** (8 / 6)) ** (-np.arange(0, 8, 2) / 8), rtol=1e-5)
    with pytest.raises(ValueError, match="rope type 'dynamic' is not supported"):
        parse("hunyuan", rope_scaling={"type": "dynamic", "factor": 2.0})


def test_declarations_and_leaves_have_one_tree():
    for kind in KINDS:
        for scan_layers in (False, True):
            config = model(KINDS[kind], scan_layers)
            leaves = jax.tree.structure(layout.target_leaves(config), is_leaf=layout.is_leaf)
            assert leaves == jax.tree.structure(target_specs(config), is_leaf=lambda node: hasattr(node, "axes"))
