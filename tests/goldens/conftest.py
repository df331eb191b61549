"""Which case folders there are, and the table of how they went."""

from pathlib import Path

import pytest
from parity import case as cases

HERE = Path(__file__).parent


def pytest_generate_tests(metafunc):
    if "folder" not in metafunc.fixturenames:
        return
    given = metafunc.config.getoption("--goldens")
    root = HERE if given is None else Path(given).expanduser().resolve()
    folders = cases.find(root)
    if not folders:
        raise pytest.UsageError(f"--goldens: there is no case.json at or below {root}")
    metafunc.parametrize("folder", folders, ids=[str(folder.relative_to(root)) for folder in folders])


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
            terminalreporter.write_line(f"{row[0]} also holds {row[-1]}, which nothing here computes")
