"""What documents show runs: the README's example, and the notebooks from top to bottom without the cell that installs the package."""

import copy
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from angelspec_jax import models

pytest_plugins = ["toy_model"]
ROOT = Path(__file__).parents[1]


@pytest.fixture
def quickstart():
    return nbformat.read(ROOT / "colab" / "quickstart.ipynb", as_version=4)


def test_one_cell_installs_and_never_jax(quickstart):
    (cell,) = [cell for cell in quickstart.cells if "install" in cell.metadata.get("tags", ())]
    assert '"jax", "jaxlib", "libtpu"' in cell.source, "the runtime's JAX is kept by constraints"
    assert not any("pip" in other.source for other in quickstart.cells if other is not cell)


def test_no_output_is_committed(quickstart):
    assert all(not cell.outputs and cell.execution_count is None for cell in quickstart.cells if cell.cell_type == "code")


def test_quickstart_on_a_toy_model(quickstart, toy_directory, drafter_directory, monkeypatch):
    monkeypatch.setenv("QUICKSTART_TARGET", str(toy_directory))
    monkeypatch.setenv("QUICKSTART_DRAFTER", str(drafter_directory))
    monkeypatch.setenv("QUICKSTART_TOKENS", "6")
    texts, images = run(quickstart, monkeypatch)
    assert "toy with toy-dfly" in texts
    assert texts.count("the same words: True") == 3
    assert images == 1


@pytest.mark.smollm2
@pytest.mark.slow
def test_quickstart_on_smollm2(quickstart, monkeypatch):
    try:
        models.smollm2(fetch=False)
        models.shipped_drafter()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("QUICKSTART_TOKENS", "48")
    texts, images = run(quickstart, monkeypatch)
    assert texts.count("the same words: True") == 3
    assert images == 1


def test_the_examples_of_the_readme(toy_directory, drafter_directory, monkeypatch, capsys):
    example = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
    monkeypatch.setattr(models, "smollm2", lambda: toy_directory)
    monkeypatch.setattr(models, "shipped_drafter", lambda: drafter_directory)
    example = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", example).replace("seed=1)", "seed=1, max_new_tokens=6)")
    exec(re.sub(r"slots=\d+, capacity=\d+", "slots=2, capacity=128", example), {})
    assert "the same words: True" in capsys.readouterr().out


def run(notebook, monkeypatch) -> tuple[str, int]:
    """What the cells print, and how many pictures they show."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # also where the package is not installed
    notebook = copy.deepcopy(notebook)
    notebook.cells = [cell for cell in notebook.cells if "install" not in cell.metadata.get("tags", ())]
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    texts = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    return texts, sum("image/png" in output.get("data", ()) for output in outputs)
