"""The wheel holds everything an installation needs, and nothing of the tests."""

import importlib.util
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> set[str]:
    """Names of the files in a freshly built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", str(folder)]
    if importlib.util.find_spec("hatchling") is not None:
        command.append("--no-build-isolation")
    done = subprocess.run([*command, str(ROOT)], capture_output=True, text=True, check=False)
    if done.returncode and "hatchling" in done.stderr and "No matching distribution" in done.stderr:
        pytest.skip("the build backend, hatchling, is neither installed nor to be had from here")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("package", ["angelspec_jax", "pallas_kernels"])
def test_every_module_and_data_file(wheel, package):
    tracked = [path for path in (ROOT / package).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert tracked
    assert {str(path.relative_to(ROOT)) for path in tracked} <= wheel


def test_configs_lie_inside_the_package(wheel):
    configs = [path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")]
    assert configs
    assert {f"angelspec_jax/{path}" for path in configs} <= wheel


def test_nothing_else(wheel):
    assert {name.split("/")[0].split("-")[0] for name in wheel} == {"angelspec_jax", "pallas_kernels"}
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_the_command_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["angelspec"].split(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert f"def {function}(" in Path(spec.origin).read_text()


def test_no_path_of_a_machine_in_the_repository():
    """What is committed must run anywhere."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    suspects = ("/home" + "/", "/work" + "/", "/root" + "/", ".." + "/shared")
    found = []
    for name in filter(None, done.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in {".py", ".md", ".yaml", ".toml", ".ipynb", ".json", ""} and path.is_file():
            text = path.read_text("utf-8", "replace")
            found += [f"{name}: {suspect}" for suspect in suspects if suspect in text]
    assert not found
