"""A conversation trains the same, whatever it shares a row with: features, anchors, labels and losses of packed documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from angelspec_jax.data.features import target_features
from angelspec_jax.drafter.loading import create_drafter
from angelspec_jax.training import prepare, step, trainer
from angelspec_jax.training.optimizer import make_optimizer

LENGTHS = (9, 14, 7)
WIDTH = 34


@pytest.fixture(scope="module")
def target():
    return tiny_run.make_target()


@pytest.fixture(scope="module")
def conversations():
    draw = np.random.default_rng(0)
    return [{"tokens": draw.integers(6, 60, n).astype(np.int32), "mask": np.arange(n) > n // 3} for n in LENGTHS]


def packed_batch(conversations):
    total = sum(LENGTHS)
    documents = np.full((1, WIDTH), -1, np.int32)
    documents[0, :total] = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    batch = {"documents": documents, "positions": np.zeros((1, WIDTH), np.int32), "lengths": np.array([total], np.int32)}
    batch["positions"][0, :total] = np.concatenate([np.arange(n) for n in LENGTHS])
    for name, key, dtype in (("tokens", "tokens", np.int32), ("loss_mask", "mask", bool)):
        batch[name] = np.zeros((1, WIDTH), dtype)
        batch[name][0, :total] = np.concatenate([c[key] for c in conversations])
    return {name: jnp.asarray(values) for name, values in batch.items()}


def single_batch(conversations):
    batch = {"tokens": np.zeros((3, WIDTH), np.int32), "loss_mask": np.zeros((3, WIDTH), bool), "lengths": np.array(LENGTHS, np.int32)}
    for row, conversation in enumerate(conversations):
        batch["tokens"][row, : LENGTHS[row]] = conversation["tokens"]
        batch["loss_mask"][row, : LENGTHS[row]] = conversation["mask"]
    return {name: jnp.asarray(values) for name, values in batch.items()}


def test_the_target_sees_one_document_at_a_time(target, conversations):
    packed, single = packed_batch(conversations), single_batch(conversations)
    found = target_features(
        target.params, target.config, packed["tokens"], (0, 1), jnp.float32, packed["documents"], packed["positions"], most=4
    )
    apart = target_features(target.params, target.config, single["tokens"], (0, 1), jnp.float32)
    start = 0
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(found[0, start : start + length], apart[row, :length], atol=2e-5)
        start += length


@pytest.mark.parametrize("family", ["dfly", "eagle3"])
def test_a_packed_row_has_the_loss_of_its_conversations_apart(target, conversations, family, tmp_path):
    """With an anchor at every place that can have one, both see the same blocks, and the loss is a mean over them."""
    overrides = [f"drafter.family={family}", "train.anchors=34", "drafter.draft_vocab=null", "drafter.drafts=3", "train.max_documents=4"]
    overrides += ["drafter.taps=[0,1]", "train.stages=[{lk_weight: 1.0, position_weighting: uniform, e2e_tv_weight: 0.0}]"]
    config = tiny_run.make_config(tmp_path, overrides)
    options = prepare.drafter_options(config.drafter, target)
    drafter = create_drafter(target, jax.random.key(0), **options)
    optimizer, _ = make_optimizer(config.train)
    _, validate = step.build(config.train, drafter.config, target.config, optimizer)
    frozen = step.Frozen(target.params, drafter.shared.embed, drafter.shared.head, None)
    together = validate(drafter.params, frozen, packed_batch(conversations), 0)
    apart = validate(drafter.params, frozen, single_batch(conversations), 0)
    np.testing.assert_array_equal(together["count"], apart["count"])
    assert together["count"][0] > 10
    np.testing.assert_allclose(together["loss"], apart["loss"], rtol=1e-5)
    np.testing.assert_allclose(together["alpha"], apart["alpha"], rtol=1e-5)


def test_a_packed_run_trains(target, tmp_path):
    said = []
    config = tiny_run.make_config(tmp_path, ["train.max_documents=3", "data.max_length=64"])
    job = trainer.prepare_job(config, target, said.append)
    assert any("packed into" in text for text in said)
    assert len(job.training) < len(job.data.training)
    exported = trainer.train(dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=0)), target=target)
    assert (exported / "model.safetensors").exists()
    with pytest.raises(ValueError, match="set train.max_documents=1"):
        trainer.prepare_job(tiny_run.make_config(tmp_path, ["train.max_documents=3", "data.cache=somewhere"]), target, said.append)
