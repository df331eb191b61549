"""Drafters bound to a target: made, saved, loaded, and refused for another target."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.drafter import block, layouts, loading
from angelspec_jax.drafter.card import DrafterCard, card_for, template_digest
from angelspec_jax.drafter.context import fusion_prior
from angelspec_jax.drafter.loading import create_drafter, load_drafter, save_drafter
from angelspec_jax.drafter.types import DraftPolicy, Seen
from angelspec_jax.mesh import make_mesh

OPTIONS = {"mask_token": 96, "taps": 3, "num_layers": 2, "intermediate_size": 24}


def _same(ours, theirs):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_new_drafter(tiny_target):
    drafter = create_drafter(tiny_target, jax.random.key(3), **OPTIONS)
    config = drafter.config
    assert (config.family, config.context, config.head, config.block_size) == ("dfly", "fc_fusion", "hidden_correction", 8)
    assert config.taps == (1, 2, 3) and config.target_num_layers == 6 and config.transformer.intermediate_size == 24
    np.testing.assert_array_equal(drafter.params.context.fusion, fusion_prior(2, 3))
    assert not np.any(drafter.params.head.down)
    assert drafter.shared.head is tiny_target.params.lm_head
    assert drafter.card.target_name == "tiny" and drafter.card.chat_template_sha256 == template_digest(tiny_target.chat_template)


@pytest.mark.parametrize(
    "family, options",
    [("dflash", {}), ("dfly", {"correction_size": 16}), ("dflash", {"layout": "anchor_first"}), ("dfly", {"draft_ids": [1, 5, 90]})],
)
def test_save_and_load(tiny_target, tmp_path, family, options):
    drafter = create_drafter(tiny_target, jax.random.key(0), family=family, **OPTIONS, **options)
    drafter = dataclasses.replace(drafter, card=dataclasses.replace(drafter.card, steps=7, tau={"chat": 2.5}))
    save_drafter(tmp_path / "d", drafter)
    again = load_drafter(tmp_path / "d", tiny_target)
    assert again.config == drafter.config and again.card == drafter.card and again.name == "d"
    _same(again.params, drafter.params)
    _same(again.shared, drafter.shared)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_bfloat16_on_disk_and_in_memory(tiny_target, tmp_path):
    drafter = create_drafter(tiny_target, jax.random.key(0), **OPTIONS)
    save_drafter(tmp_path / "d", drafter, dtype=jnp.bfloat16)
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(layouts.read(tmp_path / "d").params))
    assert load_drafter(tmp_path / "d", tiny_target).params.context.fc.dtype == jnp.float32
    small = load_drafter(tmp_path / "d", tiny_target, dtype=jnp.bfloat16)
    assert small.params.context.fc.dtype == jnp.bfloat16 and small.params.norm.dtype == jnp.float32
    features = jnp.ones((4, 3, 32), jnp.float32)
    positions = jnp.arange(4, dtype=jnp.int32)
    state = block.create_state(small.config, 1, 16, jnp.bfloat16)
    first, all_rows = jnp.zeros(4, jnp.int32), jnp.ones(4, bool)
    state = block.extend(small.params, small.config, small.shared, features, features[:, 0], first, first, positions, all_rows, state)
    policy = DraftPolicy(jnp.float32(0.0), candidates=8)
    seen = Seen(jnp.array([3], jnp.int32), jnp.array([4], jnp.int32), jnp.zeros((1, 16), jnp.int32))
    assert block.draft(small.params, small.config, small.shared, seen, state, None, policy).tokens.shape == (1, 7)
    save_drafter(tmp_path / "e", small, dtype=jnp.bfloat16)
    _same(layouts.read(tmp_path / "e").params, layouts.read(tmp_path / "d").params)


def test_a_failed_save_leaves_the_old_drafter(tiny_target, tmp_path, monkeypatch):
    drafter = create_drafter(tiny_target, jax.random.key(0), **OPTIONS)
    save_drafter(tmp_path / "d", drafter)

    def full_disk(folder, *_, **__):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loading.layouts, "write", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_drafter(tmp_path / "d", create_drafter(tiny_target, jax.random.key(1), **OPTIONS))
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    _same(load_drafter(tmp_path / "d", tiny_target).params, drafter.params)


def test_mesh(tiny_target, tmp_path):
    drafter = create_drafter(tiny_target, jax.random.key(0), mesh=make_mesh(devices=jax.devices()[:1]), **OPTIONS)
    save_drafter(tmp_path / "d", drafter)
    again = load_drafter(tmp_path / "d", tiny_target, mesh=make_mesh(devices=jax.devices()[:1]))
    _same(again.params, drafter.params)
    assert again.params.context.fc.sharding.mesh.axis_names == ("data", "fsdp", "tensor")


OTHERS = {
    "32 wide but target other is 64 wide": {"hidden_size": 64},
    r"layers \[1, 2, 3\] of a target of 6 layers, but other has 7": {"num_layers": 7},
    "vocabulary has 97 tokens but that of other has 98": {"vocab_size": 98},
}


@pytest.mark.parametrize("message", OTHERS)
def test_another_target_is_refused(message, tiny_target, tmp_path):
    save_drafter(tmp_path / "d", create_drafter(tiny_target, jax.random.key(0), **OPTIONS))
    other = types.SimpleNamespace(
        **vars(tiny_target) | {"config": dataclasses.replace(tiny_target.config, **OTHERS[message]), "name": "other"}
    )
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path / "d", other)


def test_another_template_or_thinking_mode_needs_consent(tiny_target, tmp_path):
    drafter = create_drafter(tiny_target, jax.random.key(0), **OPTIONS)
    card = card_for(tiny_target, drafter.config, thinking="off")
    save_drafter(tmp_path / "d", dataclasses.replace(drafter, card=card))
    other = types.SimpleNamespace(**vars(tiny_target) | {"chat_template": "another"})
    with pytest.raises(ValueError, match="another chat template.*allow_template_mismatch=True"):
        load_drafter(tmp_path / "d", other)
    load_drafter(tmp_path / "d", other, allow_template_mismatch=True)
    with pytest.raises(ValueError, match="thinking off but tiny runs with thinking on.*allow_template_mismatch=True"):
        load_drafter(tmp_path / "d", tiny_target, thinking="on")
    load_drafter(tmp_path / "d", tiny_target, thinking="off")


BAD_OPTIONS = {
    "family must be one of dflash, dflare, dfly, dspark": {"family": "eagle"},
    "mask_token 97 is outside": {"mask_token": 97},
    "tapped layer 6 does not exist": {"taps": (0, 6)},
    "no option 'hidden_size'": {"hidden_size": 64},
    "block_size must be between 2 and 64": {"block_size": 1},
    "ascending token ids below 97": {"draft_ids": [4, 3]},
}


@pytest.mark.parametrize("message", BAD_OPTIONS)
def test_bad_options(message, tiny_target):
    with pytest.raises(ValueError, match=message):
        create_drafter(tiny_target, jax.random.key(0), **OPTIONS | BAD_OPTIONS[message])


def test_card_keeps_what_it_does_not_know():
    data = {"target_name": "x", "tau": {"code": 3.2}, "future": {"a": 1}}
    card = DrafterCard.from_dict(data)
    assert card.to_dict() == data and card.extra == {"future": {"a": 1}}
    assert DrafterCard.from_dict(None) == DrafterCard()
    with pytest.raises(ValueError, match="must be an object"):
        DrafterCard.from_dict([1])
