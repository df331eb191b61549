"""Local paths, hub ids and buckets become local paths; the hub and the bucket are stand-ins, no network is used."""

import contextlib
import shutil
import types

import huggingface_hub
import pytest
from etils import epath
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled
from typer.testing import CliRunner

from angelspec_jax import places
from angelspec_jax.cli import app
from angelspec_jax.drafter.loading import load_drafter
from angelspec_jax.target.loading import describe, load_target
from angelspec_jax.training.prepare import check_initial

pytest_plugins = ["toy_model"]
CONTENT = {"config.json": "{}", "model.safetensors": "weights", "chat_template.jinja": "x", "README.md": "words", "tokenizer.model": "t"}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`hub.asked` collects what is asked of snapshot_download, which answers with a folder named by a commit, or raises `hub.failure`."""

    stand_in = types.SimpleNamespace(asked=[], failure=None, folder=tmp_path / "models--Org--Name" / "snapshots" / "0a1b2c")

    def snapshot_download(repository, **options):
        stand_in.asked.append((repository, options))
        if stand_in.failure is not None:
            raise stand_in.failure
        return str(stand_in.folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return stand_in


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    """A folder that stands for gs://bucket, and the cache folder."""
    folder, path = tmp_path / "bucket", epath.Path
    (folder / "toy").mkdir(parents=True)
    for name, text in CONTENT.items():
        (folder / "toy" / name).write_text(text)
    monkeypatch.setenv("ANGELSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(places.epath, "Path", lambda url: path(url.replace("gs://bucket", str(folder))))
    return folder


def test_a_local_path_is_taken_as_it_is(tmp_path, monkeypatch, hub):
    (tmp_path / "Org" / "Name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert places.resolve("Org/Name").resolve() == tmp_path / "Org" / "Name"  # although it reads as a hub id
    assert places.name("Org/Name", places.resolve("Org/Name")) == "Name"
    assert places.resolve(tmp_path / "not-there") == tmp_path / "not-there"
    assert not hub.asked
    with pytest.raises(ValueError, match="has no revisions"):
        places.resolve(tmp_path, revision="main")


def test_a_hub_id_is_fetched_at_its_revision(hub):
    path = places.resolve("Org/Name", revision="v1.0")
    assert path == hub.folder
    assert places.name("Org/Name", path) == "Name"
    [(repository, options), (again, more)] = hub.asked
    assert (repository, options["revision"]) == (again, more["revision"]) == ("Org/Name", "v1.0")
    assert set(options["allow_patterns"]) == {"*.json", "*.safetensors", "tokenizer*", "*.jinja"}
    assert set(more["allow_patterns"]) - set(options["allow_patterns"]) == {"pytorch_model*.bin"}  # for the first gave no weights


def test_a_revision_may_stand_behind_the_name(hub):
    hub.folder.mkdir(parents=True)
    (hub.folder / "model.safetensors").write_text("weights")
    path = places.resolve("Org/Name@refs/pr/1")
    assert path == hub.folder and places.name("Org/Name@refs/pr/1", path) == "Name"
    assert [(repository, options["revision"]) for repository, options in hub.asked] == [("Org/Name", "refs/pr/1")]
    with pytest.raises(ValueError, match="Org/Name@v1 has no revisions"):
        places.resolve("Org/Name@v1", revision="v2")


@pytest.mark.parametrize(
    "failure", [LocalEntryNotFoundError("no connection and nothing cached."), OfflineModeIsEnabled("HF_HUB_OFFLINE=1"), OSError("")]
)
def test_no_network_is_one_sentence(hub, failure):
    hub.failure = failure
    with pytest.raises(FileNotFoundError, match=r"^Org/Name is not a path here.*\(.+\); check the name, the network.*give its directory$"):
        load_target("Org/Name")


def test_a_target_of_the_hub_keeps_its_name(hub, tmp_path, toy_directory):
    shutil.copytree(toy_directory, hub.folder)
    described = describe("Org/Name", revision="main")
    assert (described.name, described.path) == ("Name", hub.folder)


def test_a_bucket_is_copied_once_and_again_when_it_changes(bucket, monkeypatch):
    path = places.resolve("gs://bucket/toy/")
    assert sorted(file.name for file in path.iterdir()) == sorted(set(CONTENT) - {"README.md"})
    assert (path / "model.safetensors").read_text() == "weights"
    assert places.name("gs://bucket/toy/", path) == path.name == "toy"
    copies = []
    copy = places._copy
    monkeypatch.setattr(places, "_copy", lambda *arguments, **options: (copies.append(1), copy(*arguments, **options)))
    assert places.resolve("gs:/bucket/toy") == path  # what a path object makes of it
    assert not copies
    (bucket / "toy" / "model.safetensors").write_text("other weights")
    assert (places.resolve("gs://bucket/toy") / "model.safetensors").read_text() == "other weights"
    assert list(path.parent.iterdir()) == [path]


def test_one_file_of_a_bucket(bucket):
    (bucket / "model.gguf").write_text("weights")
    path = places.resolve("gs://bucket/model.gguf")
    assert path.read_text() == "weights" and path.name == "model.gguf"


def test_a_bucket_out_of_reach_is_one_sentence(bucket, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"gs://bucket/empty could not be fetched"):
        places.resolve("gs://bucket/empty")

    def missing(url):
        raise ImportError("no module named gcsfs")

    monkeypatch.setattr(places.epath, "Path", missing)
    with pytest.raises(FileNotFoundError, match="gs://bucket/toy needs a library to read buckets.*pip install gcsfs"):
        places.resolve("gs://bucket/toy")




DOORS = {
    "target": lambda: load_target("Org/Name"),
    "drafter": lambda: load_drafter("Org/Name", None),
    "initial drafter": lambda: check_initial("Org/Name", None),
    "convert": lambda: CliRunner().invoke(app, ["convert", "Org/Name", "not-there", "--layout", "zlab"], catch_exceptions=False),
}


@pytest.mark.parametrize("door", DOORS)
def test_every_path_may_be_a_name(door, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    asked = []

    def resolve(source, revision=None):
        asked.append(str(source))
        raise FileNotFoundError("no network here")

    monkeypatch.setattr(places, "resolve", resolve)
    with contextlib.suppress(FileNotFoundError):
        DOORS[door]()
    assert asked == ["Org/Name"]
