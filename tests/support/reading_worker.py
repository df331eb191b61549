"""One of several processes that load a target together; says as JSON what it read. Call: reading_worker.py FOLDER ADDRESS COUNT INDEX"""

import json
import resource
import sys

import jax
import jax.numpy as jnp
import numpy as np

from angelspec_jax import mesh as meshes
from angelspec_jax.target.loading import load_target


def main(folder: str, address: str, count: str, index: str, *more: str) -> None:
    jax.distributed.initialize(address, int(count), int(index))
    mesh = meshes.make_mesh(fsdp=-1, tensor=2)
    jax.device_put(np.zeros(4, np.float32), jax.local_devices()[0]).block_until_ready()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    target = load_target(folder, mesh=mesh, dtype=jnp.bfloat16, need_tokenizer=False)
    jax.block_until_ready(target.params)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    leaves = jax.tree.leaves(target.params)
    held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    # Sums over all processes: the shards are parts of the same arrays.
    total = jax.jit(lambda leaves: sum(jnp.sum(jnp.abs(leaf.astype(jnp.float32))) for leaf in leaves))(leaves) if more else 0.0
    print(json.dumps({"read": target.bytes_read, "held": held, "peak": peak - before, "total": float(total)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
