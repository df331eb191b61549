"""Block losses against the reference's training cases, and every way of chunking against every other."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from angelspec_jax.training import chunks, losses
from angelspec_jax.training.anchors import block_targets, gather_rows
from angelspec_jax.training.objective import Objective, block_loss

DATA = pathlib.Path(__file__).parents[1] / "data" / "losses"
GOLDENS = pathlib.Path(__file__).parents[1] / "goldens" / "training"
CASES = ("angelspec_dflash", "angelspec_dfly")
REFERENCE_NAMES = {
    "loss_objective": "position_weighting",
    "loss_decay_gamma": "decay_gamma",
    "ce_loss_alpha": "ce_weight",
    "l1_loss_alpha": "l1_weight",
    "lk_loss_weight": "lk_weight",
    "lk_loss_type": "lk_type",
    "kl_loss_weight": "kl_weight",
    "e2e_tv_loss_weight": "e2e_tv_weight",
    "confidence_head_alpha": "confidence_weight",
    "gamma": "decay_gamma",
    "ce": "ce_weight",
    "l1": "l1_weight",
    "conf": "confidence_weight",
}


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


def load(case):
    """Arrays and objectives of a reference case, objectives in this project's names."""
    if case.startswith("angelspec"):
        folder = GOLDENS / case
        tensors = load_file(folder / "io.safetensors")
        settings = json.loads((folder / "case.json").read_text())["params"]["objectives"]
    else:
        with safe_open(DATA / f"{case}.safetensors", "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            settings = json.loads(file.metadata()["objectives"])
    arrays = {k: jnp.asarray(v.astype(np.int32) if v.dtype == np.int64 else v) for k, v in tensors.items()}
    return arrays, {k: {REFERENCE_NAMES.get(n, n): v for n, v in s.items()} for k, s in settings.items()}


def rms_norm(x, weight, eps=1e-6):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight.reshape((1,) * (x.ndim - 1) + weight.shape)


def targets(tensors, variant):
    packed = variant == "packed"
    return block_targets(
        tensors[f"in.{variant}.input_ids"],
        tensors[f"in.{variant}.loss_mask"],
        tensors[f"in.{variant}.anchors"],
        tensors[f"in.{variant}.keep"].astype(bool),
        6,
        "same_position",
        159,
        documents=tensors["in.packed.ctx_doc_ids"] if packed else None,
        positions=tensors["in.packed.base_position_ids"] if packed else None,
    )


def identity(rows):
    return rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("variant", ["unpacked", "packed"])
def test_block_targets_match_the_reference(case, variant):
    tensors, _ = load(case)
    out = targets(tensors, variant)
    keep = np.asarray(tensors[f"in.{variant}.keep"]) > 0
    np.testing.assert_array_equal(out.weight_mask, tensors[f"out.{variant}.weight_mask"])
    np.testing.assert_array_equal(np.asarray(out.labels)[keep], np.asarray(tensors[f"out.{variant}.labels"])[keep])
    np.testing.assert_array_equal(np.asarray(out.previous)[keep], np.asarray(tensors[f"out.{variant}.prev_tokens"])[keep])


@pytest.mark.parametrize("variant", ["unpacked", "packed"])
def test_teacher_rows_match_the_reference(variant):
    tensors, _ = load("angelspec_dflash")
    normed = rms_norm(tensors[f"in.{variant}.last_hidden"], tensors["in.target_norm_weight"])
    out = targets(tensors, variant)
    logits = gather_rows(normed, out.teacher_index) @ tensors["in.target_lm_head_weight"].T
    supervised = np.asarray(out.weight_mask) > 0
    expected = np.asarray(tensors[f"out.{variant}.teacher_logits"])
    np.testing.assert_allclose(np.asarray(logits)[supervised], expected[supervised], atol=1e-4)


def angelspec_cases():
    return [(case, name, variant) for case in CASES for name in load(case)[1] for variant in ("unpacked", "packed")]


@pytest.mark.parametrize("case, name, variant", angelspec_cases())
def test_angelspec_losses(case, name, variant):
    tensors, settings = load(case)
    setting = dict(settings[name])
    postnorm = setting.pop("_postnorm", False)
    wanted = Objective(**setting)
    out = targets(tensors, variant)
    head = tensors["in.target_lm_head_weight"]
    if case == "angelspec_dflash":
        student, student_head = tensors[f"out.{variant}.draft_hidden"], lambda rows: rows @ head.T
    else:
        student, student_head = tensors[f"out.{variant}.logits"], identity
    teacher, teacher_head = tensors[f"out.{variant}.teacher_logits"], identity
    if wanted.l1_weight:  # the reference's L1 takes the hidden state as it is given, normed or not
        given = tensors[f"in.{variant}.last_hidden"]
        given = rms_norm(given, tensors["in.target_norm_weight"]) if postnorm else given
        teacher, teacher_head = gather_rows(given, out.teacher_index), lambda rows: rows @ head.T
    evaluate = jax.jit(
        functools.partial(block_loss, wanted, head=student_head, teacher_head=teacher_head, layout="same_position", chunk=10)
    )
    loss, metrics = evaluate(student, teacher, out.labels, out.weight_mask)
    prefix = f"out.{variant}.{name}"
    np.testing.assert_allclose(loss, tensors[f"{prefix}.loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-7)
    if wanted.trains_rows:
        np.testing.assert_allclose(metrics["ce"], tensors[f"{prefix}.component.ce_loss"], rtol=1e-5)
    for key in ("l1", "kl", "lk", "e2e_tv"):
        if getattr(wanted, f"{key}_weight") > 0:
            np.testing.assert_allclose(metrics[key], tensors[f"{prefix}.component.{key}_loss"], rtol=1e-5, err_msg=key)
    np.testing.assert_array_equal(metrics["count"], tensors[f"out.{variant}.count_per_position"][1:])
    np.testing.assert_allclose(metrics["accuracy"], tensors[f"out.{variant}.acc_per_position"][1:], atol=1e-6)


@pytest.mark.parametrize("name", ["ce_g4", "ce_g7", "l1_g4", "dspark_default_g4", "conf_only_g4"])
def test_deepspec_losses(name):
    tensors, settings = load("deepspec_dspark_vanilla")
    wanted = Objective(**settings[name])
    out = block_targets(
        tensors["in.input_ids"], tensors["in.loss_mask"], tensors["in.anchors"], tensors["in.keep"].astype(bool),
        6, "anchor_first", 159, documents=None,
    )  # fmt: skip
    np.testing.assert_array_equal(out.weight_mask, tensors["out.eval_mask"])
    evaluate = jax.jit(functools.partial(block_loss, wanted, head=identity, layout="anchor_first", chunk=12))
    loss, metrics = evaluate(
        tensors["out.logits"],
        tensors["out.teacher_logits"],
        out.labels,
        out.weight_mask,
        confidence_logits=tensors["out.confidence_logits"],
    )
    np.testing.assert_allclose(loss, tensors[f"out.{name}.loss"], rtol=1e-5)
    mask = np.asarray(out.weight_mask)
    alpha = (np.asarray(tensors["out.accept_rate"]) * mask).sum((0, 1)) / np.maximum(mask.sum((0, 1)), 1)
    np.testing.assert_allclose(metrics["alpha"], alpha, atol=1e-5)


OBJECTIVES = {
    "ce": Objective(position_weighting="uniform"),
    "ce_l1": Objective(ce_weight=0.1, l1_weight=0.9, decay_gamma=4.0),
    "dpace_lk": Objective(position_weighting="dpace", lk_weight=1.0),
    "dpace_lk_e2e": Objective(position_weighting="dpace_masked", lk_weight=0.7, lk_type="alpha", e2e_tv_weight=0.5),
    "decay_e2e": Objective(e2e_tv_weight=1.0),
    "e2e": Objective(ce_weight=0.0, e2e_tv_weight=1.0),
    "kl_a": Objective(kl_weight=0.6, kl_topk=5, kl_renormalize=True),
    "kl_full": Objective(kl_weight=1.0),
    "lk_batch": Objective(lk_weight=0.6, lk_type="batch", e2e_tv_weight=0.5, position_weighting="dpace"),
    "confidence": Objective(ce_weight=0.3, confidence_weight=1.0),
}


def example(seed=0, batch=3, anchors=5, block=4, width=8, vocabulary=24):
    keys = jax.random.split(jax.random.key(seed), 8)
    shape = (batch, anchors, block)
    return {
        "hidden": jax.random.normal(keys[0], (*shape, width)),
        "teacher": jax.random.normal(keys[1], (*shape, width)),
        "bias": jax.random.normal(keys[2], (*shape, 3)),
        "head": jax.random.normal(keys[3], (width, vocabulary)),
        "out": jax.random.normal(keys[4], (3, vocabulary)),
        "labels": jax.random.randint(keys[5], shape, -1, vocabulary),
        "mask": (jax.random.uniform(keys[6], shape) > 0.3).astype(jnp.float32).at[0, 0].set(0.0),
        "confidence": jax.random.normal(keys[7], shape),
    }


def total(trained, data, wanted, layout, chunk, backward):
    def head(rows):
        return rows["hidden"] @ trained["head"] + rows["bias"] @ trained["out"]

    rows = {"hidden": trained["hidden"], "bias": trained["bias"]}
    return block_loss(
        wanted, rows, data["teacher"] if wanted.needs_teacher else None, data["labels"], data["mask"], head,
        layout=layout, chunk=chunk, teacher_head=lambda rows: rows @ data["head"],
        confidence_logits=trained["confidence"], backward=backward,
    )  # fmt: skip


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_chunking_gives_the_same_loss_and_gradients(name):
    data, layout = example(), "same_position" if len(name) % 2 else "anchor_first"
    others = [(25, "fused"), (25, "recompute")]
    if name in ("dpace_lk_e2e", "confidence"):  # sequences split too; one chunk only; logits kept
        others += [(1, "fused"), (10_000, "fused"), (4, "save")]
    trained = {k: data[k] for k in ("hidden", "bias", "head", "out", "confidence")}
    step = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=(2, 3, 4, 5))
    (loss, metrics), gradients = step(trained, data, OBJECTIVES[name], layout, 10_000, "save")
    assert float(loss) > 0
    for chunk, backward in others:
        (other, other_metrics), other_gradients = step(trained, data, OBJECTIVES[name], layout, chunk, backward)
        np.testing.assert_allclose(other, loss, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other_gradients, gradients)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), other_metrics, metrics)


@pytest.mark.parametrize("backward", ["fused", "recompute"])
def test_gradient_matches_finite_differences(backward):
    data = example(batch=2, anchors=2)
    wanted = Objective(position_weighting="uniform", ce_weight=0.5, kl_weight=0.4, e2e_tv_weight=1.0)  # no detached factor

    @jax.jit
    def loss(hidden):
        return total({**data, "hidden": hidden}, data, wanted, "anchor_first", 8, backward)[0]

    gradient = jax.grad(loss)(data["hidden"])
    slope = jnp.sqrt(jnp.vdot(gradient, gradient))
    step = 2e-3 * gradient / slope  # uphill, where the slope is largest against rounding
    numeric = (loss(data["hidden"] + step) - loss(data["hidden"] - step)) / 4e-3
    np.testing.assert_allclose(slope, numeric, rtol=5e-3)


def test_batch_level_lk_is_one_share_for_all_rows():
    data, wanted = example(), Objective(lk_weight=1.0, lk_type="batch", position_weighting="uniform")
    trained = {k: data[k] for k in ("hidden", "bias", "head", "out", "confidence")}
    data = data | {"labels": jnp.maximum(data["labels"], 0)}

    def plain(trained):
        student = trained["hidden"] @ trained["head"] + trained["bias"] @ trained["out"]
        teacher = data["teacher"] @ data["head"]
        kl, alpha = losses.forward_kl(student, teacher), losses.acceptance(student, teacher)
        return losses.lk_batch(kl, alpha, data["mask"], 3.0)

    value, gradient = jax.value_and_grad(plain)(trained)
    (found, metrics), own = jax.value_and_grad(lambda t: total(t, data, wanted, "anchor_first", 8, "fused"), has_aux=True)(trained)
    np.testing.assert_allclose(found, value, rtol=1e-5)
    np.testing.assert_allclose(metrics["lk"], value, rtol=1e-5)
    np.testing.assert_allclose(own["head"], gradient["head"], rtol=1e-3, atol=1e-6)


def test_a_slot_that_never_drafts_receives_nothing():
    data = example()
    loss = jax.jit(jax.grad(lambda h: total({**data, "hidden": h}, data, OBJECTIVES["ce"], "same_position", 8, "fused")[0]))
    gradient = loss(data["hidden"])
    assert not gradient[:, :, 0].any() and gradient[:, :, 1:].any()


def test_labels_outside_the_draft_vocabulary():
    data = example(batch=1, anchors=1)
    labels, mask = jnp.asarray([[[3, -1, 5, 6]]], jnp.int32), jnp.ones((1, 1, 4))
    data = {**data, "labels": labels, "mask": mask}
    wanted = Objective(e2e_tv_weight=1.0, position_weighting="uniform")
    evaluate = jax.jit(lambda d: total(d, d, wanted, "anchor_first", 8, "fused")[1])
    metrics = evaluate(data)
    without = evaluate({**data, "mask": mask.at[0, 0, 1].set(0.0)})
    np.testing.assert_allclose(metrics["ce"], without["ce"], rtol=1e-6)
    assert metrics["alpha"][1] == 0.0 and metrics["accuracy"][1] == 0.0 and metrics["count"][1] == 1.0
    np.testing.assert_allclose(metrics["tau"], 1.0 + metrics["alpha"][0], rtol=1e-6)
    np.testing.assert_allclose(metrics["e2e_tv"], 1.0 - metrics["alpha"][0] / 4.0, rtol=1e-6)


@pytest.mark.parametrize("name", ["dpace_lk_e2e", "decay_e2e"])
def test_nothing_supervised_gives_zero_loss_and_gradient(name):
    data = example()
    data["mask"] = jnp.zeros_like(data["mask"])

    def loss(hidden):
        return total({**data, "hidden": hidden}, data, OBJECTIVES[name], "anchor_first", 8, "fused")[0]

    value, gradient = jax.jit(jax.value_and_grad(loss))(data["hidden"])
    assert value == 0.0 and not gradient.any()


def test_bfloat16_hidden_states_keep_their_type():
    data = example()
    half = {k: v.astype(jnp.bfloat16) if v.dtype == jnp.float32 and k in ("hidden", "bias", "head", "out") else v for k, v in data.items()}
    gradients = jax.jit(jax.grad(lambda t: total(t, data, OBJECTIVES["dpace_lk_e2e"], "same_position", 8, "fused")[0]))(
        {k: half[k] for k in ("hidden", "bias", "head", "out", "confidence")}
    )
    assert {k: v.dtype for k, v in gradients.items() if k != "confidence"} == dict.fromkeys(("hidden", "bias", "head", "out"), jnp.bfloat16)


VOCABULARY = 151_936
ROW = 4 * VOCABULARY  # bytes of one row of logits


def temporary(wanted, chunk, backward):
    """Bytes of temporaries of a loss and its gradient over 2048 rows, as compiled."""
    width, batch, anchors, block = 16, 2, 128, 8

    def loss(hidden, teacher, labels, mask, head, confidence):
        return block_loss(
            wanted, hidden, teacher, labels, mask, lambda x: x @ head,
            layout="anchor_first", chunk=chunk, backward=backward, confidence_logits=confidence,
        )[0]  # fmt: skip

    hidden = jax.ShapeDtypeStruct((batch, anchors, block, width), jnp.float32)
    labels, mask = (jax.ShapeDtypeStruct((batch, anchors, block), t) for t in (jnp.int32, jnp.float32))
    head = jax.ShapeDtypeStruct((width, VOCABULARY), jnp.float32)
    return jax.jit(jax.grad(loss)).lower(hidden, hidden, labels, mask, head, mask).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("backward", ["fused", "recompute"])
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "dpace_lk" else pytest.mark.slow) for n in OBJECTIVES])
def test_memory_grows_with_the_chunk_and_not_with_the_rows(name, backward):
    small, large = temporary(OBJECTIVES[name], 32, backward), temporary(OBJECTIVES[name], 128, backward)
    assert small < 32 * ROW * 8 and 2 < large / small < 5, (small, large)


def test_saved_logits_take_the_memory_of_all_rows():
    assert temporary(OBJECTIVES["dpace_lk"], 32, "save") > 2048 * ROW


def test_chunks_cover_every_block_once():
    for batch, anchors, drafts, chunk in [(3, 5, 4, 1), (3, 5, 4, 25), (3, 5, 4, 100), (7, 2, 3, 10), (1, 9, 2, 6)]:
        grid = chunks.grid_of(batch, anchors, drafts, chunk)
        assert grid.sequences * grid.anchors * drafts <= max(chunk, drafts)
        values = jnp.arange(batch * anchors * drafts).reshape(batch, anchors, drafts)
        np.testing.assert_array_equal(chunks.join(chunks.split(values, grid), grid), values)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"position_weighting": "linear"}, "position_weighting 'linear'.*uniform"),
        ({"lk_type": "beta"}, "lk_type 'beta'.*hybrid"),
        ({"lk_weight": 1.5}, "lk_weight must lie between 0 and 1"),
        ({"ce_weight": -1.0}, "ce_weight must not be negative"),
        ({"lk_weight": 0.5, "kl_weight": 0.5}, "exclude each other"),
        ({"ce_weight": 0.0}, "has no term"),
        ({"decay_gamma": 0.0}, "decay_gamma must be positive"),
    ],
)
def test_bad_objectives_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Objective(**settings)


def test_missing_inputs_are_named():
    data = example()
    args = (data["hidden"], None, data["labels"], data["mask"], lambda rows: rows @ data["head"])
    with pytest.raises(ValueError, match="hidden states"):
        block_loss(OBJECTIVES["dpace_lk"], *args, layout="anchor_first")
    with pytest.raises(ValueError, match="confidence head"):
        block_loss(OBJECTIVES["confidence"], args[0], data["teacher"], *args[2:], layout="anchor_first")
    with pytest.raises(ValueError, match="layout 'middle'"):
        block_loss(OBJECTIVES["ce"], *args, layout="middle")
    with pytest.raises(ValueError, match="backward mode 'slow'"):
        block_loss(OBJECTIVES["ce"], *args, layout="anchor_first", backward="slow")
