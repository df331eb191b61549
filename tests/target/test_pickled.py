"""pytorch_model.bin: read where torch is installed, by its weights-only loader, and nothing in it is ever run."""

import json
import pickle
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from angelspec_jax.target import torch_io
from angelspec_jax.target.config import TransformerConfig
from angelspec_jax.target.loading import load_target
from angelspec_jax.target.safetensors_io import open_checkpoint

TOY = TransformerConfig(40, 16, 24, 2, 4, 2, 8, qk_norm="before_rope")


class Trap:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def pickled(tmp_path, write_model, torch):
    """A toy model directory whose weights are pickled, and its parameters."""
    params = write_model(tmp_path, TOY)
    checkpoint = open_checkpoint(tmp_path)
    tensors = {name: torch.from_numpy(checkpoint.read(name)) for name in checkpoint.names()}
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    return tmp_path, params, tensors


def test_parameters_come_back(pickled):
    folder, params, _ = pickled
    target = load_target(folder, need_tokenizer=False)
    jax.tree.map(np.testing.assert_array_equal, target.params, params)
    assert target.bytes_read == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_bfloat16_in_shards(pickled, torch):
    folder, params, tensors = pickled
    names, where = sorted(tensors), {}
    for part in range(2):
        mine = names[part::2]
        torch.save({name: tensors[name].to(torch.bfloat16) for name in mine}, folder / f"part-{part}.bin")
        where |= dict.fromkeys(mine, f"part-{part}.bin")
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    target = load_target(folder, need_tokenizer=False, dtype=jnp.bfloat16)
    assert target.params.embed.dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda ours, given: given.astype(jnp.bfloat16).astype(ours.dtype), target.params, params)
    jax.tree.map(np.testing.assert_array_equal, target.params, rounded)
    for name, message in (("../part-0.bin", "not a plain file name in its own directory; refused"), ("gone.bin", "which is not there")):
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where | {names[0]: name}}))
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load_target(folder, need_tokenizer=False)


def test_safetensors_are_taken_where_there_are_both(tmp_path, write_model):
    params = write_model(tmp_path, TOY)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    jax.tree.map(np.testing.assert_array_equal, load_target(tmp_path, need_tokenizer=False).params, params)


def test_nothing_in_a_file_is_run(pickled, torch):
    folder, _, tensors = pickled
    file, mark = folder / "pytorch_model.bin", folder / "sprung"
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()  # the trap works
    mark.unlink()
    bare = pickle.dumps({"a": Trap(mark)})
    for write in (lambda: file.write_bytes(bare), lambda: torch.save(tensors | {"a": Trap(mark)}, file)):
        write()
        with pytest.raises(ValueError, match=r"pytorch_model.bin is not a file of weights .* nothing in it was run; save safetensors"):
            load_target(folder, need_tokenizer=False)
        assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda torch: [1, 2], "holds list, not tensors by name"),
        (lambda torch: {"a": 3}, "entry 'a' is no plain tensor"),
        (lambda torch: {1: torch.zeros(1)}, "entry '1' is no plain tensor"),
        (lambda torch: {"a": torch.zeros(1).expand(2**40)}, r"tensor a of shape \[1099511627776\] is larger than the file"),
        (lambda torch: {"a": torch.zeros(2, 2).to_sparse()}, "entry 'a' is no plain tensor"),
        (lambda torch: {name: torch.zeros(1) for name in "abc"}, "has no tensor model.embed_tokens.weight"),
    ],
)
def test_files_that_hold_something_else(pickled, torch, content, message):
    folder, *_ = pickled
    torch.save(content(torch), folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=message):
        load_target(folder, need_tokenizer=False)


@pytest.mark.parametrize("keep", [0, 10, 0.5])
def test_damaged_files(pickled, keep):
    folder, *_ = pickled
    file = folder / "pytorch_model.bin"
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    with pytest.raises(ValueError, match="is not a file of weights that torch's weights-only loader reads"):
        load_target(folder, need_tokenizer=False)


def test_an_old_torch_is_not_trusted(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(__version__="2.5.1+cpu"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"torch 2\.5\.1\+cpu cannot read safely; install torch 2\.6 or later"):
        torch_io.open_pickled(tmp_path / "pytorch_model.bin")
