"""Every case folder against our numbers: the fixtures beside this file, or with `--goldens DIR` those anywhere below DIR."""

import pytest
from parity import case as cases
from parity import table


def test_parity(folder, record_property, request):
    case = cases.load(folder)
    record_property("kind", case.kind)
    record_property("family", case.family)
    try:
        table.check(case)
    except cases.Unsupported as reason:
        if request.config.getoption("--goldens") is None:
            raise  # a fixture of ours is of a family that is supported
        pytest.skip(f"not supported: {reason}")
    finally:
        record_property("worst", str(case.worst or ""))
        record_property("compared", len(case.deviations))
        record_property("unchecked", ", ".join(case.unchecked))
