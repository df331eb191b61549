"""Where models lie: a local path, a Hugging Face hub id (`Qwen/Qwen3-8B`, or `Qwen/Qwen3-8B@main` at a branch, tag or commit) or a bucket
(`gs://bucket/folder`); all become a local path.

Hub models go to huggingface_hub's own cache (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE hold), buckets to the cache folder of this package.
"""

import fnmatch
import functools
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path

import huggingface_hub
from etils import epath

from angelspec_jax.models import cache_folder

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
BUCKET = re.compile(r"gs:/+(?=[^/])")  # a path object has dropped one of the two slashes
REVISION = re.compile(rf"({HUB_ID.pattern})@([\w./-]+)")
FILES = ("*.json", "*.safetensors", "tokenizer*", "*.jinja")
PICKLED = "pytorch_model*.bin"  # fetched only where there are no safetensors


def resolve(source: str | os.PathLike, revision: str | None = None) -> Path:
    """The local path of a model; what is not on this machine is fetched first.

    A path that exists is taken as it is, before anything else is tried; one that neither exists nor reads as a hub id or a bucket is
    returned for the caller to complain about. `revision` is a branch, tag or commit of a hub id. Raises FileNotFoundError with the reason
    and the remedy when something cannot be fetched, ValueError when `revision` is given for what has none.
    """
    text = os.fspath(source)
    path = Path(text).expanduser()
    named = None if path.exists() else REVISION.fullmatch(text)
    if named is not None and revision in (None, named[2]):
        text, revision = named[1], named[2]
    on_hub = not path.exists() and HUB_ID.fullmatch(text) is not None
    if revision is not None and not on_hub:
        raise ValueError(f"{text} has no revisions; only a Hugging Face hub id has, such as Qwen/Qwen3-8B")
    if on_hub:
        return _from_hub(text, revision)
    return _from_bucket(BUCKET.sub("gs://", text, count=1).rstrip("/")) if BUCKET.match(text) else path


def name(source: str | os.PathLike, path: Path) -> str:
    """What to call the model of `source`, which lies at `path`: the last part of either (a hub cache's folders are named by commit)."""
    text = os.fspath(source).rstrip("/")
    named = None if Path(text).expanduser().exists() else REVISION.fullmatch(text)
    text = text if named is None else named[1]
    remote = BUCKET.match(text) or not Path(text).expanduser().exists()
    return text.rsplit("/", 1)[-1] if remote else path.resolve().name


def _from_hub(repository: str, revision: str | None) -> Path:
    try:
        # Folders of a repository hold other forms of the same weights (original/, onnx/).
        fetch = functools.partial(huggingface_hub.snapshot_download, repository, revision=revision, ignore_patterns=["*/*"])
        folder = fetch(allow_patterns=list(FILES))
        if not any(Path(folder).glob("*.safetensors")):
            folder = fetch(allow_patterns=[*FILES, PICKLED])
    except (OSError, ValueError) as error:
        at = "" if revision is None else f" at revision {revision}"
        raise FileNotFoundError(
            f"{repository} is not a path here, and as a model of the Hugging Face hub it could not be fetched{at} ({_reason(error)}); "
            "check the name, the network and, for a gated model, HF_TOKEN, or download it elsewhere and give its directory"
        ) from error
    return Path(folder)


def _from_bucket(url: str) -> Path:
    """A copy in the cache, complete or absent; made again when the bucket's files have other names or sizes."""
    place = cache_folder() / "buckets" / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rsplit("/", 1)[-1]
    try:
        remote = epath.Path(url)
        there = list(remote.iterdir()) if remote.is_dir() else [remote]
        pickled = not any(file.name.endswith(".safetensors") for file in there)
        files = {file.name: file for file in there if _wanted(file.name, pickled)}
        if not files:
            raise FileNotFoundError("there are no model files")
        sizes = {key: file.stat().length for key, file in files.items()}
        if not place.exists() or sizes != _sizes(place):
            _copy(files, place, folder=remote.is_dir())
    except ImportError as error:
        raise FileNotFoundError(f"{url} needs a library to read buckets ({_reason(error)}): pip install gcsfs") from error
    except Exception as error:  # every storage library has exceptions of its own, for no network and no permission alike
        raise FileNotFoundError(
            f"{url} could not be fetched ({_reason(error)}); check the name, the network and the credentials, "
            "or copy it here and give its path"
        ) from error
    return place


def _wanted(name: str, pickled: bool) -> bool:
    patterns = (*FILES, PICKLED) if pickled else FILES
    return name.endswith(".gguf") or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _sizes(place: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in (place.iterdir() if place.is_dir() else [place])}


def _copy(files: dict[str, epath.Path], place: Path, *, folder: bool) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as work:  # beside its place, so that the last move is a rename
        fresh = Path(work) / "fresh"
        fresh.mkdir()
        for key, file in files.items():
            with file.open("rb") as source, (fresh / key).open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 24)
        if place.is_dir():
            shutil.rmtree(place)
        os.replace(fresh if folder else fresh / place.name, place)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
