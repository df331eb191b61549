"""One environment for every test: CPU with eight virtual devices, strict array semantics, compiled programs kept between runs."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # for the processes that tests start; here see `pytest_runtest_setup`
FLAGS = {
    "xla_force_host_platform_device_count": 8,
    # Eight devices on a busy machine of two cores may wait for each other longer than XLA's patience of 40 seconds.
    "xla_cpu_collective_call_warn_stuck_timeout_seconds": 300,
    "xla_cpu_collective_call_terminate_timeout_seconds": 1200,
    # The suite's time is compilation: older fusion code and one module a program halve it. XLA_FLAGS set outside wins over all of these.
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": 1,
}
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{name}={value}" for name, value in FLAGS.items() if name not in given)]).strip()

import annotation_checks  # noqa: E402

annotation_checks.install(("angelspec_jax", "pallas_kernels"))

import jax  # noqa: E402
import pytest  # noqa: E402

from angelspec_jax.mesh import enable_compilation_cache  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
enable_compilation_cache(os.path.expanduser("~/.cache/angelspec-jax/compiled-tests"))


OPTIMIZED = ("pallas_kernels",)  # interpreted kernels run longer than they compile


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """LLVM's expensive passes cost most tests, of many small programs, more than they save; set before any fixture compiles."""
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    jax.config.update("jax_disable_most_optimizations", room not in OPTIMIZED)


@pytest.fixture(scope="module", autouse=True)
def programs_end_with_their_file():
    """Every compiled program holds memory maps, of which Linux grants a process 65,530: beyond them the compiler dies."""
    yield
    jax.clear_caches()


def pytest_addoption(parser):
    parser.addoption("--goldens", metavar="DIR", help="tests/goldens checks every case folder below DIR instead of its own fixtures")
