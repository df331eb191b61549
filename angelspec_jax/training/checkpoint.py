"""Checkpoints of a run: Orbax, written in the background, the last few kept, restored bit for bit onto any mesh.

One checkpoint holds the whole training state (parameters, optimizer, random key, step) and a JSON record (the run's config, seconds spent).
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: str | Path, keep: int = 2):
        self.folder = Path(folder).resolve() / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                # What is superseded goes only once its successor is complete, so a failed save leaves the last good one.
                max_to_keep=keep,
                enable_async_checkpointing=True,
                cleanup_tmp_directories=True,
            ),
        )

    def latest_step(self) -> int | None:
        """Step of the newest complete checkpoint, None when there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state, record: dict[str, Any]) -> None:
        """Start writing `state`, and `record` as JSON; returns once the state is copied off the devices.

        An error of this or of the previous save raises OSError with one sentence.
        """
        try:
            self._manager.save(
                step, args=ocp.args.Composite(state=ocp.args.StandardSave(_without_keys(state)), record=ocp.args.JsonSave(record))
            )
        except Exception as error:
            raise self._failure(step, error) from error

    def wait(self) -> None:
        """Until everything started is on disk; raises what went wrong there."""
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            raise self._failure(None, error) from error

    def read_record(self, step: int) -> dict[str, Any]:
        """What was saved beside the state of a step."""
        found: Any = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))
        return found.record

    def restore(self, step: int, like):
        """The state of a step with the tree, dtypes and shardings of `like` (arrays or shape-dtype structs)."""
        try:
            found: Any = self._manager.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(jax.tree.map(_abstract, _without_keys(like))))
            )
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"checkpoint {step} in {self.folder} does not fit this run's drafter or optimizer: {reason}") from error
        return jax.tree.map(_with_key, like, found.state)

    def close(self) -> None:
        self._manager.close()

    def _failure(self, step: int | None, error: Exception) -> OSError:
        last = self._last_good()
        kept = f"the last good checkpoint, step {last}, is kept" if last is not None else "there is no earlier checkpoint"
        what = "writing a checkpoint" if step is None else f"saving the checkpoint of step {step}"
        cause = _root(error)
        reason = getattr(cause, "strerror", None) or " ".join(str(cause).split())[:200]
        remedy = "free space there or choose another output folder, then run again to resume"
        return OSError(f"{what} in {self.folder} failed ({reason}); {kept}; {remedy}")

    def _last_good(self) -> int | None:
        """Read from the disk: the manager's own list may count the save that failed."""
        steps = [int(path.name) for path in self.folder.iterdir() if path.name.isdigit()]
        return max(steps, default=None)


def _is_key(leaf) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _without_keys(tree):
    """Typed random keys as their bits; everything else as it is."""
    return jax.tree.map(_bits, tree)


def _bits(leaf):
    if not _is_key(leaf):
        return leaf
    return jax.eval_shape(jax.random.key_data, leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else jax.random.key_data(leaf)


def _abstract(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def _with_key(like, leaf):
    if not _is_key(like):
        return leaf
    impl = None if isinstance(like, jax.ShapeDtypeStruct) else jax.random.key_impl(like)  # None: the default kind
    return jax.random.wrap_key_data(leaf, impl=impl)


def _root(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
