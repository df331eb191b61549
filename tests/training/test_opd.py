"""Half on-policy distillation: branches are scored as the target scores them alone, and the gradient reaches the sequential head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from angelspec_jax.data.features import target_features
from angelspec_jax.drafter import block
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.training import losses, opd, prepare, step, trainer

ANCHORS = np.array([[2, 5, 0], [3, 8, 9]])
KEEP = np.array([[True, True, False], [True, True, True]])
LENGTH = 12


@pytest.fixture(scope="module")
def target():
    return tiny_run.make_target()


@pytest.fixture(scope="module")
def tokens():
    return jnp.asarray(np.random.default_rng(0).integers(6, 60, (2, LENGTH)), jnp.int32)


def test_branches_are_scored_as_texts_of_their_own(target, tokens):
    positions = jnp.tile(jnp.arange(LENGTH, dtype=jnp.int32), (2, 1))
    branch = jnp.asarray(np.random.default_rng(1).integers(6, 60, (2, 3, 3)), jnp.int32)
    branch = branch.at[:, :, 0].set(jnp.take_along_axis(tokens, jnp.asarray(ANCHORS), axis=1))
    score = opd.scorer(target.params, target.config, tokens, positions, jnp.asarray(ANCHORS, jnp.int32), jnp.asarray(KEEP))
    found = score(branch)
    for sequence, slot in zip(*np.nonzero(KEEP), strict=True):
        anchor = ANCHORS[sequence, slot]
        text = jnp.concatenate([tokens[sequence, :anchor], branch[sequence, slot]])
        alone = target_features(target.params, target.config, text[None], (), jnp.float32)[0, anchor:, 0]
        np.testing.assert_allclose(found[sequence, slot], alone, atol=2e-5)


@pytest.mark.parametrize(("family", "layout"), [("dfly", "same_position"), ("dflash", "anchor_first")])
def test_loss_is_that_of_the_drafters_own_blocks(target, tokens, family, layout):
    ids = jnp.asarray(np.sort(np.random.default_rng(2).choice(72, 40, replace=False)), jnp.int32)
    options = {"mask_token": 3, "block_size": 4, "num_layers": 1, "taps": (0, 1), "layout": layout, "family": family}
    drafter = create_drafter(target, jax.random.key(3), draft_ids=ids, **options)
    params = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(jax.random.key(p.size), p.shape), drafter.params)
    config, rows = drafter.config, drafter.shared.head
    states = jax.random.normal(jax.random.key(4), (2, 3, 4, 16))
    anchors, keep = jnp.take_along_axis(tokens, jnp.asarray(ANCHORS), axis=1), jnp.asarray(KEEP)
    teacher = jax.random.normal(jax.random.key(5), (2, 3, config.num_drafts, 16)) * 4
    head = functools.partial(step._slot_head, params, config, rows)
    plain = functools.partial(step._head, rows=rows)

    def loss(params, chunk):
        own = functools.partial(step._slot_head, params, config, rows)
        arguments = (params, config, drafter.shared.embed, states, anchors, keep, own, plain, lambda branch: teacher)
        return opd.distillation(*arguments, draft_ids=ids, chunk=chunk)

    # Slot by slot, a block at a time.
    previous, students, chosen = anchors, [], []
    for j in range(config.num_drafts):
        before = jnp.zeros((2, 3, 4), jnp.int32).at[:, :, config.first_slot + j].set(previous)
        corrected = block.teacher_forced(params, config, drafter.shared.embed, states, before)
        logits = head(jax.tree.map(lambda x, k=config.first_slot + j: x[:, :, k].reshape(6, -1), corrected)).reshape(2, 3, -1)
        chosen.append(jnp.argmax(logits, axis=-1))
        students.append(logits)
        previous = ids[chosen[-1]]
    told, own = jnp.stack(students, axis=2), jnp.stack(chosen, axis=2)
    judged = plain(teacher.reshape(-1, 16)).reshape(told.shape)
    hits = jnp.argmax(judged, axis=-1) == own
    mask = jnp.broadcast_to(keep[:, :, None], hits.shape).astype(jnp.float32)
    k3, weights = losses.two_stream_k3(-losses.cross_entropy(told, own), -losses.cross_entropy(judged, own), hits, mask)
    for chunk in (4, 1000):
        (value, accepted), gradient = jax.value_and_grad(loss, has_aux=True)(params, chunk)
        np.testing.assert_allclose(value, losses.weighted_mean(k3, weights), rtol=1e-4)
        np.testing.assert_allclose(accepted, np.cumprod(np.asarray(hits), axis=-1).sum(-1)[KEEP].mean(), rtol=1e-5)
        if family == "dfly":
            assert float(jnp.abs(gradient.head.gate_up).max()) > 0


def test_a_run_with_distillation_trains_and_names_what_it_cannot(target, tmp_path):
    stages = "train.stages=[{ce_weight: 1.0, opd_weight: 0.5}]"
    config = tiny_run.make_config(tmp_path, [stages, "train.steps=1", "evaluation.every=0", "train.max_documents=2"])
    trainer.train(config, target=target)
    assert '"tau_own"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    drafter = prepare.drafter_config(config.drafter, target)
    with pytest.raises(ValueError, match=r"train.stages.0.opd_weight needs the target inside the step"):
        prepare.check_objectives(tiny_run.make_config(tmp_path, [stages, "data.cache=somewhere"]), drafter)
    mtp = tiny_run.make_config(tmp_path, [stages, "drafter.family=mtp", "drafter.taps=null", "drafter.draft_vocab=null"])
    with pytest.raises(ValueError, match=r"opd_weight is for block drafters"):
        prepare.check_objectives(mtp, prepare.drafter_config(mtp.drafter, target))


def test_an_unnormed_teacher_is_the_last_layers_output(target, tokens):
    frozen, batch = step.Frozen(target.params, target.params.embed, target.params.embed, None), {"tokens": tokens}
    features, normed = step._features(frozen, batch, target.config, (0,), jnp.float32, 1, True)
    same, raw = step._features(frozen, batch, target.config, (0,), jnp.float32, 1, False)
    last = target_features(target.params, target.config, tokens, (1,), jnp.float32)
    np.testing.assert_allclose(raw, last[:, :, 0], atol=1e-6)
    np.testing.assert_allclose(features, same, atol=1e-6)
    assert float(jnp.abs(raw - normed).max()) > 0.1
