"""Which case folders there are, and the table of how they went."""

from pathlib import Path

import pytest
from parity import case as cases

HERE = Path(__file__).parent
# Of our own fixtures the default run takes at least one of every family; these are the others, which `-m "slow or not slow"` adds.
SLOW = {
    "drafters": (
        "angelspec_dflash", "angelspec_dfly_wide_heads", "angelspec_dspark", "deepspec_dflash", "deepspec_dspark_conf_nomarkov",
        "deepspec_dspark_vanilla", "eagle3_llama_vllm_keys_fcnorm", "mtp_dense", "zlab_dflash_wide_heads",
    ),
    "e2e": ("deepspec_eagle3_trained", "zlab_dflash_random", "zlab_dflash_trained"),
    "targets": ("qwen3_bf16", "qwen3_untied"),
    "training": (
        "angelspec_dflare", "angelspec_dflash", "angelspec_dspark", "deepspec_dflash", "deepspec_dspark_rnn", "deepspec_dspark_vanilla",
        "deepspec_eagle3", "eagle3_llama_full", "mtp_dense",
    ),
}  # fmt: skip


def pytest_generate_tests(metafunc):
    if "folder" not in metafunc.fixturenames:
        return
    given = metafunc.config.getoption("--goldens")
    root = HERE if given is None else Path(given).expanduser().resolve()
    folders = cases.find(root)
    if not folders:
        raise pytest.UsageError(f"--goldens: there is no case.json at or below {root}")
    slow = {HERE / group / name for group, names in SLOW.items() for name in names} if given is None else set()
    marked = [pytest.param(folder, marks=pytest.mark.slow) if folder in slow else folder for folder in folders]
    metafunc.parametrize("folder", marked, ids=[str(folder.relative_to(root)) for folder in folders])


def pytest_terminal_summary(terminalreporter):
    """Passed, failed and unsupported cases with the largest error of each, in units of its tolerance."""
    rows = []
    for outcome, word in (("passed", "passed"), ("failed", "FAILED"), ("skipped", "unsupported")):
        for report in terminalreporter.stats.get(outcome, []):
            found = dict(getattr(report, "user_properties", ()))
            if "worst" in found:
                name = report.nodeid.partition("[")[2].rstrip("]")
                rows.append((name, found["family"], found["kind"], word, str(found["compared"]), found["worst"], found["unchecked"]))
    if not rows:
        return
    head = ("case", "family", "kind", "result", "compared", "largest error of its tolerance")
    shown = [head, *(row[:-1] for row in sorted(rows))]
    widths = [max(len(row[column]) for row in shown) for column in range(len(head))]
    terminalreporter.section("parity with the references")
    for row in shown:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    counts = {word: sum(row[3] == word for row in rows) for word in ("passed", "FAILED", "unsupported")}
    terminalreporter.write_line(", ".join(f"{count} {word}" for word, count in counts.items()))
    for row in sorted(rows):
        if row[-1]:
            terminalreporter.write_line(f"{row[0]} also holds what is not compared: {row[-1]}")
