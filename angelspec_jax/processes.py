"""Several processes working on one run: how they find each other, agree on stopping, and end when one of them is lost.

The same command runs on every host. On TPU VMs the machines find each other; elsewhere a coordinator's address, the number of processes and
the id of each are given. A supervisor, which never touches a device, waits for the process that does the work and turns its death into a
sentence, because the runtime ends a process whose partners are gone from C++, where no Python handler runs.
"""

import contextlib
import ctypes
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

SUPERVISED = "ANGELSPEC_SUPERVISED"  # set for the process that does the work
PARENT_DEATH_SIGNAL = 1  # prctl's number: a supervisor that is killed takes its process along
PORT = 8476
LOST = (
    "this process stopped because another process of the run was lost or failed (its own output says why); "
    "the same command on every host continues from the last checkpoint"
)
# What a broken connection says, in the words of gloo, of the coordination service and of gRPC.
BROKEN = ("gloo", "connection reset", "connection closed", "socket closed", "coordination service", "coordinationservice", "heartbeat")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Which processes make up a run; all None where the machines know it themselves or there is only one process."""

    coordinator: str | None = None  # HOST or HOST:PORT of process 0
    processes: int | None = None
    process_id: int | None = None
    timeout: int = 120  # seconds without a sign of life until a process counts as lost, at the start and later

    def __post_init__(self):
        given = (self.coordinator, self.processes, self.process_id)
        if None in given and given != (None, None, None):
            raise ValueError("--coordinator, --processes and --process-id belong together: give all three, or none on a TPU VM")
        if self.processes is not None and self.process_id is not None and not 0 <= self.process_id < self.processes:
            raise ValueError(
                f"--process-id must be from 0 to {self.processes - 1} with --processes {self.processes}, got {self.process_id}"
            )
        if self.timeout < 1:
            raise ValueError(f"--timeout must be at least 1 second, got {self.timeout}")

    @property
    def several(self) -> bool:
        """Whether the run has (or may have) more than one process."""
        return self.coordinator is not None or on_tpu_vm()

    @property
    def address(self) -> str | None:
        if self.coordinator is None or ":" in self.coordinator:
            return self.coordinator
        return f"{self.coordinator}:{PORT}"


def on_tpu_vm() -> bool:
    """Whether this machine has TPU chips that JAX will use."""
    if "tpu" not in (os.environ.get("JAX_PLATFORMS") or "tpu") or importlib.util.find_spec("libtpu") is None:
        return False
    return any(Path("/dev").glob("accel*")) or any(path.name.isdigit() for path in Path("/dev/vfio").glob("*"))


def start(cluster: Cluster) -> None:
    """Join the other processes. Nothing happens where there is one process; must come before JAX looks for devices."""
    if not cluster.several:
        return
    if supervised() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    import jax

    # What is lost ends with an error in the waiting collective where the network tells; where it does not, after `timeout`.
    names = ("initialization_timeout", "heartbeat_timeout_seconds", "shutdown_timeout_seconds")
    limits = dict.fromkeys(names, cluster.timeout)
    if cluster.coordinator is None:
        # A machine with chips but no cluster around it (a notebook's) knows no coordinator and is alone.
        with contextlib.suppress(ValueError):
            jax.distributed.initialize(**limits)
        return
    try:
        jax.distributed.initialize(cluster.address, cluster.processes, cluster.process_id, **limits)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:160]
        raise ConnectionError(
            f"process {cluster.process_id} did not find the other {(cluster.processes or 1) - 1} at {cluster.address} within "
            f"{cluster.timeout} s ({reason}); start the same command on every host with its own --process-id"
        ) from error


@contextlib.contextmanager
def joined(cluster: Cluster, expected: Callable[[BaseException], bool]) -> Iterator[None]:
    """Work together with the other processes; an error here ends this process at once, so that the others notice.

    `expected` says which errors are one sentence; the others show where they come from.
    """
    start(cluster)
    try:
        yield
    except Exception as error:
        if not cluster.several:
            raise
        if expected(error):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            traceback.print_exc()
        leave(1 if isinstance(error, ConnectionError) else 2)


def supervise(arguments: Sequence[str]) -> int:
    """Run `python arguments...` as a child, pass signals on, and return its exit code; a violent death is told in one sentence."""
    child = subprocess.Popen([sys.executable, *arguments], env=os.environ | {SUPERVISED: str(os.getpid())}, start_new_session=True)
    previous = {number: signal.signal(number, lambda got, frame: child.send_signal(got)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if child.poll() is None:
            child.kill()
    if code >= 0:
        return code
    ended = f"this process was ended by {signal.Signals(-code).name}; the same command continues its run"
    print(f"error: {LOST if -code == signal.SIGABRT else ended}", file=sys.stderr)
    return 1


def supervised() -> bool:
    return SUPERVISED in os.environ


def lost(error: BaseException) -> bool:
    """Whether an error says that the connection to another process broke."""
    text = str(error).lower()
    return any(word in text for word in BROKEN)


def leave(code: int) -> None:
    """End at once, without the farewell that waits for processes that are no longer there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def first() -> bool:
    """Whether this is process 0, which alone prints and writes."""
    import jax

    return jax.process_index() == 0


def agree(value: int) -> int:
    """The largest `value` of all processes; every process must call it at the same place."""
    import jax

    if jax.process_count() == 1:
        return value
    import numpy as np
    from jax.experimental import multihost_utils

    return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def check_shared(folder: Path) -> None:
    """Raise OSError unless all processes see the same `folder`, which the checkpoints of a run with several processes need."""
    import jax

    if jax.process_count() == 1:
        return
    import numpy as np
    from jax.experimental import multihost_utils

    number = int(multihost_utils.broadcast_one_to_all(np.int32(int.from_bytes(os.urandom(3), "big"))))
    mark = folder / f".shared-{number}"
    if jax.process_index() == 0:
        mark.touch()
    multihost_utils.sync_global_devices("marked")
    missing = agree(0 if mark.exists() else 1 + jax.process_index())
    if jax.process_index() == 0:
        mark.unlink()
    if missing:
        raise OSError(
            f"output folder {folder} is not the same on process {missing - 1}; with several processes it must be on a shared disk"
        )
