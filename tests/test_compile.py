"""Programs compiled for TPUs that are not there: configs and sentences always, the compiler itself with `-m tpu_aot`."""

import dataclasses
import json
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format
from typer.testing import CliRunner

from angelspec_jax import compile as compiling
from angelspec_jax import config as configs
from angelspec_jax import mesh as meshes
from angelspec_jax import params
from angelspec_jax.cli import app
from angelspec_jax.config import packaged
from angelspec_jax.decoding import generate
from angelspec_jax.decoding.step import Plan
from angelspec_jax.target import kv_cache, moe
from angelspec_jax.target.layers import Layer, layer_specs, swiglu
from angelspec_jax.target.transformer import target_specs
from pallas_kernels import aot

needs_compiler = pytest.mark.skipif(not aot.available(), reason="libtpu, the TPU compiler, is not installed")
CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
BILLIONS = {"qwen3_8b": 8.19, "qwen3_30b_a3b": 30.5, "hy3": 295, "qwen3_4b_2507_mtp_128k": 4.02}


@pytest.mark.parametrize("path", sorted((packaged() / "targets").glob("*.yaml")), ids=lambda path: path.stem)
def test_packaged_targets_have_their_published_size(path):
    models = compiling.describe(compiling.load(f"targets/{path.stem}", []), None)
    assert params.count(target_specs(models.target)) / 1e9 == pytest.approx(BILLIONS[path.stem], rel=0.01)
    assert models.drafter.num_drafts == (4 if models.drafter.family == "mtp" else 7) and models.target.scan_layers


def test_the_long_text_recipe_is_the_one_that_is_compiled():
    """What `targets/` says of it again, because it is compiled without a checkpoint, is what the training config says."""
    recipe = configs.load("train/qwen3_4b_2507_mtp_128k")
    shape = compiling.load("targets/qwen3_4b_2507_mtp_128k", []).train
    assert (shape.batch_size, shape.length) == (recipe.train.batch_size, recipe.data.max_length)
    for name in ("accumulate", "anchors", "compute_dtype", "ttt", "chunk", "anchor_rule", "max_documents"):
        assert getattr(shape.settings, name) == getattr(recipe.train, name), name
    assert shape.settings.stages[0].objective == recipe.train.stages[0].objective
    assert (shape.mesh.fsdp, shape.mesh.sequence) == (recipe.mesh.fsdp, recipe.mesh.sequence)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
def test_layers_are_those_of_one_part_of_a_batch(monkeypatch):
    """The compiler counts the loop over the parts once, and so does what is added for the layers it does not see."""
    seen, compiled = [], SimpleNamespace(compile=lambda: SimpleNamespace(cost_analysis=dict))
    monkeypatch.setattr(compiling, "_report", lambda *arguments: arguments)
    monkeypatch.setattr(compiling, "_whole_pass", lambda models, mesh, *shape: seen.append(shape[:2]) or compiled)
    config = compiling.load("targets/qwen3_4b_2507_mtp_128k", [])
    mesh = meshes.make_mesh(1, 1, 1, jax.devices()[:4], 4)
    layers = compiling.compile_train(config.train, compiling.describe(config, None), "v5p:2x2x1", mesh)[5]
    layers()
    assert seen == [(1, 131072)] * 2  # one layer and two, one of eight sequences


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
def test_experts_are_told_from_what_else_a_device_holds():
    models = compiling.describe(compiling.load("targets/hy3", []), None)
    weights = compiling.abstract_weights(models, meshes.make_mesh(1, -1, 2, jax.devices()[:8]))
    assert compiling.expert_bytes(weights.target) == 79 * 192 * 3 * 4096 * 1536 * 2 // 8
    dense = compiling.describe(compiling.load("targets/qwen3_8b", []), 2)
    assert compiling.expert_bytes(target_specs(dense.target)) == 0


def test_a_target_cut_short_keeps_its_kinds_of_layers():
    models = compiling.describe(compiling.load("targets/hy3", []), 2)
    assert models.target.num_layers == 2 and [models.target.is_sparse(index) for index in range(2)] == [False, True]
    assert models.drafter.taps == (0, 1)


@pytest.mark.parametrize("name", ["v6e", "v6e:", "v9:2x2", "v6e:2by4", "cpu:2x2"])
def test_a_bad_topology_is_one_sentence(name):
    with pytest.raises(ValueError, match="should look like v6e:2x4"):
        compiling.slice_devices(name)


def test_a_missing_compiler_is_one_sentence(monkeypatch):
    monkeypatch.setattr(aot, "available", lambda: False)
    found = CliRunner().invoke(app, ["compile", "targets/qwen3_8b", "--topology", "v6e:2x4"])
    assert found.exit_code == 2 and "needs its compiler, libtpu, which is not installed" in found.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "99"], "layers must lie between 1 and the target's 36"),
        (["--only", "decode,lunch"], "no program 'lunch'"),
        (["decode.mesh.tensor=3"], "v6e:2x4: mesh"),
        (["drafter.mask_token=hole"], "must be a token id here"),
    ],
)
def test_mistakes_are_told_before_any_compile(monkeypatch, arguments, said):
    monkeypatch.setattr(compiling, "slice_devices", lambda topology: jax.devices()[:8])
    monkeypatch.setattr(compiling, "compile_decode", lambda *_: pytest.fail("compiled"))
    only = [] if "--only" in arguments else ["--only", "decode"]
    found = CliRunner().invoke(app, ["compile", "targets/qwen3_8b", *arguments, *only])
    assert found.exit_code == 2 and said in " ".join(found.output.split())


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
def test_weights_that_cannot_fit_are_told_before_any_compile():
    config = compiling.load("targets/hy3", [])
    mesh = meshes.make_mesh(1, 1, 8, jax.devices()[:8])
    with pytest.raises(RuntimeError, match=r"decode step does not fit v5e:2x4, which has 16\.0 GiB a device: \d+\.\d GiB of weights"):
        compiling.compile_decode(config.decode, compiling.describe(config, None), "v5e:2x4", mesh)


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 (virtual) devices")
def test_slots_and_heads_of_a_state_are_spread():
    models = compiling.describe(compiling.load("targets/qwen3_8b", []), 2)
    plan = Plan(models.target, models.drafter, budgets=(0, 7))
    mesh = meshes.make_mesh(2, 1, 4, jax.devices()[:8])
    state = jax.eval_shape(lambda: generate.create_state(plan, jnp.bfloat16, 4, 256))
    paged = jax.eval_shape(lambda: kv_cache.create(models.target, 4, 256, jnp.bfloat16, kv_cache.PAGE))
    placed = compiling.spread_state(dataclasses.replace(state, cache=paged), mesh)
    assert placed.cache.k.sharding.shard_shape(placed.cache.k.shape) == (2, 4, 2, 128, 128)
    assert placed.tokens.sharding.shard_shape(placed.tokens.shape) == (2, 256)
    whole = sum(x.size * x.dtype.itemsize for x in (paged.k, paged.v))
    assert compiling.local_bytes(placed.cache) == whole // 8


def test_weights_lie_on_a_tpu_as_their_product_reads_them():
    """The order reaches the array, survives stacking, changes no number, and is none of a CPU's business."""
    spec = params.stack(layer_specs(compiling.describe(compiling.load("targets/qwen3_8b", []), 2).target), 3).gate_up
    spec = dataclasses.replace(spec, shape=(3, 16, 2, 24))
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert meshes.placement(spec, place, "cpu") is place
    wanted = meshes.placement(spec, place, "tpu")
    assert isinstance(wanted, Format) and wanted.layout.major_to_minor == (0, 2, 1, 3)
    weights = np.random.default_rng(0).normal(size=spec.shape).astype(np.float32)
    plain, ordered = jax.device_put(weights, place), jax.device_put(weights, wanted)
    assert ordered.format.layout.major_to_minor == (0, 2, 1, 3) != plain.format.layout.major_to_minor
    x, down = jnp.ones((4, 16)), jnp.ones((24, 16))
    run = jax.jit(lambda x, gate_up, down: jax.lax.scan(lambda x, w: (swiglu(x, w, down), None), x, gate_up)[0])
    np.testing.assert_allclose(run(x, ordered, down), run(x, plain, down), rtol=1e-5)


def test_an_order_names_every_axis_once():
    with pytest.raises(ValueError, match="must name each of its axes once"):
        params.Param((2, 3), (None, None), order=(0, 0))


def test_progress_tells_what_is_done_and_for_how_long():
    said = []
    with compiling.Progress(said.append, every=0.01).step("decode step: compiling"):
        while len(said) < 3:
            time.sleep(0.01)
    assert said[0] == "decode step: compiling" and said[2] == "decode step: compiling: 0 s so far"
    told = len(said)
    time.sleep(0.05)
    assert len(said) == told


def test_kernel_memory_is_read_from_the_program():
    line = 'custom_call_target="tpu_custom_call", x={"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"SIZE"}]}'
    assert aot.kernel_memory("\n".join(line.replace("SIZE", size) for size in ("7", "4096", "12"))) == 4096
    assert aot.kernel_memory("no kernel") == 0


# Compile time is that of the layer bodies: the target scans over one, a block drafter has as many as layers.
SMALL = (
    "drafter.layers=1",
    *("decode.requests=8", "decode.capacity=1024"),
    *("train.batch_size=8", "train.length=1024", "train.settings.anchors=64"),
)
FAMILIES = {
    "dfly": (),
    "dspark": ("drafter.family=dspark",),
    "mtp": ("drafter.family=mtp", "drafter.taps=null"),
    "eagle3": ("drafter.family=eagle3", "drafter.taps=3"),
}


def on_chips(names, first):
    """Every chip with every name. A program takes minutes of CPU: beyond one name on every chip and all on one, it is slow."""
    short = lambda chip, name: name == first or chip == "v6e:2x2"  # noqa: E731
    pairs = [(chip, name) for chip in CHIPS for name in names]
    return [pytest.param(*pair, marks=[] if short(*pair) else [pytest.mark.slow]) for pair in pairs]


@pytest.mark.tpu_aot
@needs_compiler
@pytest.mark.parametrize("topology", CHIPS)
def test_no_weight_is_copied_on_its_way_to_a_product(topology):
    """A scan over layers reads each layer's weights where they are."""
    mesh = meshes.make_mesh(1, 1, 1, compiling.slice_devices(topology)[:1])
    layer = layer_specs(compiling.describe(compiling.load("targets/qwen3_8b", []), 2).target)
    specs = params.stack((layer.gate_up, layer.down), 4)
    weights = params.abstract(specs, jnp.bfloat16, meshes.placements(mesh, specs))
    x = jax.ShapeDtypeStruct((256, 4096), jnp.bfloat16, sharding=meshes.replicated(mesh))
    run = jax.jit(lambda x, weights: jax.lax.scan(lambda x, w: (swiglu(x, *w), None), x, weights)[0])
    memory = run.lower(x, weights).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 32 * 2**20  # gate_up of one layer takes 192


@pytest.mark.tpu_aot
@needs_compiler
@pytest.mark.parametrize(("topology", "family"), on_chips(FAMILIES, "dfly"))
def test_decode_step(topology, family):
    """Draft loop, switch over budgets, kernels and commit in one program that keeps its caches in place."""
    config = compiling.load("targets/qwen3_8b", [*SMALL, *FAMILIES[family]])
    (report,) = compiling.run(config, topology, layers=2, parts=("decode",))
    cache = 2 * 2 * 8 * 1024 * 8 * 128 * 2
    assert report.vmem_bytes > 0  # the kernels are in it
    assert report.temporary_bytes < max(cache, 256 * 2**20)
    assert report.estimated_seconds > report.floor_seconds > 0


@pytest.mark.tpu_aot
@needs_compiler
@pytest.mark.parametrize(("topology", "name"), on_chips(("qwen3_8b", "qwen3_30b_a3b", "hy3"), "qwen3_8b"))
def test_training_step(topology, name):
    config = compiling.load(f"targets/{name}", [*SMALL, "train.mesh.fsdp=-1", "train.mesh.tensor=1"])
    (report,) = compiling.run(config, topology, layers=2, parts=("train",))
    assert report.vmem_bytes > 0 and report.flops > 0


@pytest.mark.tpu_aot
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "tpu7x:2x2x1"])
def test_a_sequence_of_131072_tokens_over_all_devices(topology):
    """No device holds a layer's activations of the whole text: its keys and values are the most that is gathered."""
    (report,) = compiling.run(compiling.load("targets/qwen3_4b_2507_mtp_128k", []), topology, layers=2, parts=("train",))
    assert report.vmem_bytes > 0 and report.hbm_bytes < report.hbm_limit
    width_of_one_layer = 131072 * 2 * 9728 * 2  # bytes of its feed-forward product
    assert report.temporary_bytes < 2 * width_of_one_layer


@pytest.mark.tpu_aot
@needs_compiler
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_no_expert_is_copied_on_its_way_to_a_product(topology):
    """A scan over layers reads the experts that have rows where they are, in the stack of all layers.

    Not so on 7x, whose grouped product wants tiles of 16 rows where arguments lie in tiles of 8: there the stack is copied once a step.
    """
    mesh = meshes.make_mesh(1, 1, 1, compiling.slice_devices(topology)[:1])
    model = compiling.describe(compiling.load("targets/qwen3_30b_a3b", []), 2).target
    config = dataclasses.replace(model.moe, num_experts=16)
    specs = params.stack(moe.moe_specs(config, model.hidden_size), 4)
    weights = params.abstract(specs, jnp.bfloat16, meshes.placements(mesh, specs))
    # Few rows: a v5p keeps float32 products of all rows in HBM, which would hide a copy.
    x = jax.ShapeDtypeStruct((64, model.hidden_size), jnp.bfloat16, sharding=meshes.replicated(mesh))

    def run(x, weights):
        sliced, complete = moe.aside(Layer(*[None] * 6, moe=weights))
        step = lambda x, part: (moe.routed(complete(part[1], part[0]).moe, config, x).astype(x.dtype), None)  # noqa: E731
        return jax.lax.scan(step, x, (jnp.arange(4, dtype=jnp.int32), sliced))[0]

    with jax.set_mesh(mesh):
        memory = jax.jit(run).lower(x, weights).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 32 * 2**20  # 16 experts of one layer take 144


@pytest.mark.tpu_aot
@needs_compiler
@pytest.mark.parametrize(("topology", "name"), on_chips(("qwen3_30b_a3b", "hy3"), None))
def test_experts_are_not_gathered(topology, name):
    """A device that held all experts of a layer would need several times the memory."""
    overrides = [*SMALL, "decode.mesh.fsdp=-1", "decode.mesh.tensor=2"]
    (report,) = compiling.run(compiling.load(f"targets/{name}", overrides), topology, layers=2, parts=("decode",))
    config = compiling.describe(compiling.load(f"targets/{name}", []), 2).target.moe
    assert config is not None
    experts = 3 * config.num_experts * config.intermediate_size * (2048 if name == "qwen3_30b_a3b" else 4096) * 2
    assert report.temporary_bytes < experts / 2


@pytest.mark.tpu_aot
@needs_compiler
def test_the_command_prints_and_writes(tmp_path):
    output = tmp_path / "found.json"
    arguments = ["compile", "targets/qwen3_8b", *SMALL, "--topology", "v6e:2x2", "--only", "kernels", "--output", str(output)]
    found = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert found.exit_code == 0 and "tree attention" in found.output
    programs = json.loads(output.read_text())["programs"]
    assert [program["program"] for program in programs] == ["tree attention", "cache commit", "anchor attention, gradient"]
    assert programs[0]["bytes_accessed"] < 1.2 * 8 * 1024 * 4 * 128 * 2 * 2  # half of the eight kv heads
    assert programs[0]["origins"]["hbm_bytes"].startswith("compiler")


@pytest.mark.tpu_aot
@needs_compiler
def test_a_slice_that_does_not_exist_is_one_sentence():
    with pytest.raises(ValueError, match="'v6e:3x5' does not exist"):
        compiling.slice_devices("v6e:3x5")
