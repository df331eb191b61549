"""Every block family through the whole training job at the smallest size: its own parts learn, and the export is the drafter."""

import jax
import numpy as np
import pytest
import tiny_run

from angelspec_jax import config as configs
from angelspec_jax.drafter.loading import create_drafter, load_drafter
from angelspec_jax.training import prepare, trainer

QUIET = ("evaluation.every=0", "train.steps=3", "train.save_every=100", "train.log_every=1")
CONFIDENT = ("train.stages=[{lk_weight: 1.0, position_weighting: dpace_masked, confidence_weight: 1.0}]",)
CE = ("train.stages=[{}]",)
FAMILIES = {  # overrides, and the parameters that are this family's own
    "dflare": (("drafter.family=dflare", "drafter.init=target", *CE), lambda p: (*p.context.kv, p.context.fusion)),
    "dspark": (
        ("drafter.family=dspark", "drafter.layout=anchor_first", "drafter.rank=4", "drafter.draft_vocab=null", *CONFIDENT),
        lambda p: (p.head.w1, p.head.w2, p.confidence.weight, p.confidence.bias),
    ),
    "dspark_rnn": (
        ("drafter.family=dspark", "drafter.head=markov_rnn", "drafter.rank=4", "drafter.confidence=hidden", *CONFIDENT),
        lambda p: (p.head.w1, p.head.w2, p.head.joint, p.head.joint_bias, p.confidence.weight),
    ),
    "gated_sum": (
        ("drafter.family=dflash", "drafter.context=gated_sum", *CE),
        lambda p: (p.context.fusion_gate, p.context.candidate_norm),
    ),
}


@pytest.fixture(scope="module")
def target():
    return tiny_run.make_target()


@pytest.mark.parametrize("name", ["dflare", "dspark", *(pytest.param(n, marks=pytest.mark.slow) for n in ("dspark_rnn", "gated_sum"))])
def test_a_family_trains_and_exports(name, target, tmp_path):
    overrides, own = FAMILIES[name]
    config = tiny_run.make_config(tmp_path, [*QUIET, *overrides])
    options = prepare.drafter_options(config.drafter, target)
    ids = None if config.drafter.draft_vocab is None else np.arange(config.drafter.draft_vocab)
    before = create_drafter(target, jax.random.key(0), draft_ids=ids, **options)
    exported = load_drafter(trainer.train(config, target=target), target)
    assert exported.config == before.config
    started = prepare.warm.start(before, target) if config.drafter.init == "target" else before.params
    for fresh, trained in zip(own(started), own(exported.params), strict=True):
        assert np.isfinite(trained).all()
        if name == "dspark_rnn" or not np.any(fresh) or config.drafter.init == "target":
            assert (np.asarray(fresh) != np.asarray(trained)).any()


def test_recipes_draft_as_much_from_the_same_features():
    dfly, *others = (configs.load(f"train/smollm2_{name}") for name in ("dfly", "dflare", "dspark"))
    for other in others:
        assert (other.data.paths, other.data.seed, other.data.max_length) == (dfly.data.paths, dfly.data.seed, dfly.data.max_length)
        assert (other.drafter.taps, other.drafter.layers) == (dfly.drafter.taps, dfly.drafter.layers)
    assert others[1].drafter.block_size == dfly.drafter.block_size - 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("drafter.family=dspark", *CE), "no stage has a confidence_weight.*drafter.confidence=none"),
        (("drafter.family=dfly", *CONFIDENT), "has no confidence head"),
        (("drafter.family=dfly", "drafter.rank=4", *CE), "a Markov head, and no other, has a rank"),
        (("drafter.family=dflash", "drafter.confidence=hidden_markov", *CONFIDENT), "use confidence=hidden"),
    ],
)
def test_parts_that_do_not_go_together_are_told_before_any_compile(overrides, words, target, tmp_path):
    with pytest.raises(ValueError, match=words):
        trainer.train(tiny_run.make_config(tmp_path, overrides), target=target)
