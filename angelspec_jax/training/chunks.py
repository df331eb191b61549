"""Cutting a batch of blocks [B, A, ...] into chunks that a loop works through one at a time."""

import dataclasses
import math

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Grid:
    """How [B, A] is cut into chunks of `sequences` x `anchors` blocks."""

    batch: int
    slots: int
    sequences: int
    anchors: int


def grid_of(batch: int, anchors: int, drafts: int, chunk: int) -> Grid:
    """Chunks of at most `chunk` rows, but at least one block; `drafts` rows make a block.

    Anchors are split first, so that a batch axis sharded over devices stays sharded inside every chunk.
    """
    blocks = max(1, chunk // drafts)
    if blocks >= batch:
        return Grid(batch, anchors, batch, _balanced(anchors, blocks // batch))
    return Grid(batch, anchors, _balanced(batch, blocks), 1)


def _balanced(total: int, most: int) -> int:
    """The size of equal parts of at most `most` that cover `total` with the least padding."""
    return math.ceil(total / math.ceil(total / most))


def split(values, grid: Grid):
    """Leaves [B, A, ...] -> [chunks, sequences, anchors, ...], padded with zeros (mask 0)."""

    def cut(x):
        rows, columns = math.ceil(grid.batch / grid.sequences), math.ceil(grid.slots / grid.anchors)
        padding = [(0, rows * grid.sequences - grid.batch), (0, columns * grid.anchors - grid.slots)] + [(0, 0)] * (x.ndim - 2)
        x = jnp.pad(x, padding).reshape(rows, grid.sequences, columns, grid.anchors, *x.shape[2:])
        return jnp.swapaxes(x, 1, 2).reshape(rows * columns, grid.sequences, grid.anchors, *x.shape[4:])

    return jax.tree.map(cut, values)


def join(values, grid: Grid):
    """The inverse of `_split`."""

    def paste(x):
        rows, columns = math.ceil(grid.batch / grid.sequences), math.ceil(grid.slots / grid.anchors)
        x = jnp.swapaxes(x.reshape(rows, columns, grid.sequences, grid.anchors, *x.shape[3:]), 1, 2)
        x = x.reshape(rows * grid.sequences, columns * grid.anchors, *x.shape[4:])
        return x[: grid.batch, : grid.slots]

    return jax.tree.map(paste, values)


def scan(body, carry, parts):
    """`lax.scan`, without the loop when there is one part (a loop would copy what it stacks)."""
    if jax.tree.leaves(parts)[0].shape[0] > 1:
        return jax.lax.scan(body, carry, parts)
    carry, out = body(carry, jax.tree.map(lambda x: x[0], parts))
    return carry, jax.tree.map(lambda x: x[None], out)
