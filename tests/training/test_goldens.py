"""AngelSpec's training cases from checkpoint to gradient: every objective's loss and the gradients of the named parameters."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from angelspec_jax.drafter import block, layouts, layouts_block
from angelspec_jax.target.layers import rms_norm
from angelspec_jax.training.anchors import block_targets, gather_rows
from angelspec_jax.training.objective import Objective, block_loss

FOLDER = Path(__file__).parents[1] / "goldens" / "training"
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
}


def _settings(case):
    return json.loads((FOLDER / case / "case.json").read_text())["params"]


def _given(io, variant):
    given = {name.split(".")[-1]: jnp.asarray(value) for name, value in io.items() if name.startswith(f"in.{variant}.")}
    tokens = given["input_ids"].astype(jnp.int32)
    documents = given["ctx_doc_ids"].astype(jnp.int32) if variant == "packed" else None
    chain = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    positions = given["base_position_ids"].astype(jnp.int32) if variant == "packed" else chain
    return given, tokens, documents, positions


def _objective(setting):
    """Our objective, and whether its teacher sees the target's state after the final norm.

    The reference's L1 takes that state as it comes, before the norm, unless the case says it was normed.
    """
    setting = dict(setting)
    normed = setting.pop("_postnorm", False)
    objective = Objective(**{REFERENCE_NAMES.get(key, key): value for key, value in setting.items()})
    return objective, normed or not objective.l1_weight


@pytest.mark.parametrize("variant", ["unpacked", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients(case, variant):
    folder, settings = FOLDER / case, _settings(case)
    io = load_file(folder / "io.safetensors")
    params, config, *_ = layouts.read(folder)
    params = jax.tree.map(jnp.asarray, params)
    embed, head = jnp.asarray(load_file(folder / "model.safetensors")["embed_tokens.weight"]), jnp.asarray(io["in.target_lm_head_weight"])
    given, tokens, documents, positions = _given(io, variant)
    anchors, keep = given["anchors"].astype(jnp.int32), given["keep"] > 0
    objectives = {name: _objective(setting) for name, setting in settings["objectives"].items()}

    @jax.jit
    def run(params):
        targets = block_targets(
            tokens, given["loss_mask"].astype(jnp.float32), anchors, keep, config.block_size, config.layout, config.mask_token,
            documents=documents, positions=positions,
        )  # fmt: skip

        def forward(params):
            hidden = block.training_hidden(
                params, config, embed, given["target_hidden"], positions, anchors, keep, targets.block_tokens, documents
            )
            return block.teacher_forced(params, config, embed, hidden, targets.previous)

        raw = given["last_hidden"]
        teachers = {False: raw, True: rms_norm(raw, jnp.asarray(io["in.target_norm_weight"]), config.transformer.rms_norm_eps)}
        rows = {normed: gather_rows(teacher, targets.teacher_index) for normed, teacher in teachers.items()}
        hidden, back = jax.vjp(forward, params)

        def loss_of(hidden, objective, normed):
            return block_loss(
                objective, hidden, rows[normed], targets.labels, targets.weight_mask, lambda x: x @ head.T, layout=config.layout, chunk=24
            )[0]

        losses, cotangents = zip(*(jax.value_and_grad(loss_of)(hidden, *objective) for objective in objectives.values()), strict=True)
        return losses, jax.vmap(back)(jnp.stack(cotangents))[0]

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        losses, gradients = run(params)
    for index, (name, loss) in enumerate(zip(objectives, losses, strict=True)):
        ours = layouts_block.drafter_tensors(jax.tree.map(lambda x, i=index: x[i], gradients), config)
        prefix = f"out.{variant}.{name}"
        np.testing.assert_allclose(loss, io[f"{prefix}.loss"], rtol=1e-5, err_msg=name)
        for parameter in settings["grad_params"]:
            expected = io[f"{prefix}.grad.{parameter}"]
            atol = 1e-4 * np.abs(expected).max()
            found = ours[layouts_block.plain_name(parameter)]
            np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=f"{name} {parameter}")
