"""Run configs: packaged files, overrides, and one sentence for every mistake."""

import dataclasses

import pytest

from angelspec_jax import config as configs
from angelspec_jax.config import TrainConfig, as_dict, build, find, load, packaged

MINIMAL = "target: {source: model}\ndata: {paths: answers.jsonl}\noutput: run\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted(p for p in (packaged() / "train").glob("*.yaml")), ids=lambda p: p.stem)
def test_packaged_training_configs_are_valid_and_survive_a_round_trip(path):
    config = load(f"train/{path.stem}")
    assert build(TrainConfig, as_dict(config), "copy") == config


def test_defaults_and_overrides(file):
    config = load(file, ["train.steps=12", "train.learning_rate=1e-3", "drafter.taps=[1,4,7]", "drafter.mask_token=<file_sep>"])
    assert config.train.steps == 12
    assert config.train.learning_rate == 1e-3
    assert config.drafter.taps == (1, 4, 7)
    assert config.drafter.mask_token == "<file_sep>"
    assert config.data.files == ("answers.jsonl",)
    assert load(file, ["train.steps=1e4"]).train.steps == 10_000


def test_stage_fields_stand_beside_until(file):
    text = MINIMAL + "train:\n  stages:\n    - {until: 0.75, lk_weight: 1.0}\n    - {until: 1.0, ce_weight: 0.0, e2e_tv_weight: 1.0}\n"
    file.write_text(text)
    stages = load(file, ["train.stages.0.until=0.5", "train.steps=10"]).train.stages
    assert [stage.until for stage in stages] == [0.5, 1.0]
    assert stages[0].objective.lk_weight == 1.0
    assert stages[1].objective.e2e_tv_weight == 1.0
    assert load(file, ["train.steps=10"]).train.stage_ends() == (8, 10)


def test_base_and_references(tmp_path, file):
    child = tmp_path / "child.yaml"
    child.write_text("base: run.yaml\noutput: elsewhere\ndata: {cache: '${output}/features'}\n")
    config = load(child, ["output=there"])
    assert config.target.source == "model"
    assert config.data.paths == "answers.jsonl"
    assert config.data.cache == "there/features"


def test_base_cycle_is_named(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text("base: loop.yaml\n")
    with pytest.raises(ValueError, match="leads back"):
        load(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trian.steps=4", ["unknown key trian", "did you mean train?", "run.yaml"]),
        ("train.step=4", ["unknown key train.step", "did you mean train.steps?"]),
        ("train.zzz=4", ["unknown key train.zzz", "steps"]),
        ("train.stages=[{until: 1.0, lk_wait: 1}]", ["train.stages.0.lk_wait", "lk_weight"]),
        ("train.steps=many", ["train.steps must be a whole number, got 'many'"]),
        ("train.steps=true", ["train.steps must be a whole number"]),
        ("train.steps=0", ["steps must be at least 1"]),
        ("train.betas=[0.9]", ["train.betas must be a list of 2 values"]),
        ("train.betas=0.9", ["train.betas must be a list"]),
        ("train.stages=[{until: 0.5}]", ["train: the `until` of the stages must be rising fractions that end at 1.0"]),
        ("drafter.family=dflush", ["drafter.family must be one of dflash, dflare, dfly, dspark"]),
        ("drafter.taps=[1,x]", ["drafter.taps.1 must be a whole number"]),
        ("drafter=3", ["drafter must be a mapping"]),
        ("train.ema=half", ["train.ema must be a number"]),
        ("output=null", ["output must be text"]),
        ("train.steps", ["must look like section.key=value"]),
        ("train.steps=[", ["not valid YAML"]),
        ("output.name=x", ["output is 'run', which has no key 'name'"]),
        ("output=${nowhere}", ["nowhere"]),
    ],
)
def test_mistakes_are_one_sentence(file, override, words):
    with pytest.raises(ValueError) as caught:
        load(file, [override])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_missing_key_missing_file_and_bad_yaml(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("target: {source: model}\noutput: run\n")
    with pytest.raises(ValueError, match="data.paths is missing"):
        load(path)
    path.write_text("a: [1\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load(path)
    path.write_text("- 1\n")
    with pytest.raises(ValueError, match="mapping"):
        load(path)
    with pytest.raises(FileNotFoundError, match="did you mean train/smollm2_dfly"):
        find("train/smolm2_dfly")


def test_sections_refuse_values_out_of_range(file):
    for override in ("train.warmup=1.5", "train.clip_norm=0", "train.ema=1.0", "train.min_learning_rate=1", "drafter.block_size=1"):
        with pytest.raises(ValueError, match=override.split("=")[0].split(".")[1]):
            load(file, [override])


def test_other_schemas_can_be_built():
    @dataclasses.dataclass(frozen=True)
    class Small:
        size: int = 1

    assert build(Small, {"size": 3}, "here") == Small(3)
    assert configs.to_json(Small()) == '{\n  "size": 1\n}'
