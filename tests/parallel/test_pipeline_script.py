"""scripts/pipeline.py, clipped over its stages, makes the whole model's steps, in fp32 and bf16."""

import pytest

from tests.forked import forked, results
from tests.small import ROOT

SCRIPT = ROOT / "scripts" / "pipeline.py"


def test_clipped_stages_are_the_whole_model():
    """One process, one norm, one batch: what it may differ by is the rounding of bf16."""
    told = results(forked("tests/ranks/script_stages.py", ranks=3))
    for precision, near in (("fp32", 1e-5), ("bf16", 0.02)):
        cases = [case[precision] for case in told]
        assert sum(case["weights"] for case in cases) == cases[0]["all"]  # each weight once
        for case in cases:
            assert all(right > 0.1 for _, right in case["norms"])  # each step is clipped
            assert all(norm == pytest.approx(right, rel=near) for norm, right in case["norms"])
            assert case["apart"] < near * 0.05  # three steps of norm 0.05 at most
        assert len(cases[-1]["losses"]) == 3
        assert all(loss == pytest.approx(right, rel=near) for loss, right in cases[-1]["losses"])
    exact, rounded = (told[-1][precision]["losses"] for precision in ("fp32", "bf16"))
    assert exact != rounded  # bf16 was computed in


def test_the_script_trains_in_bf16_and_clipped():
    printed = forked(SCRIPT, "--steps", 12, "--bf16", "--clip", 0.5, ranks=2)
    first, last = (float(line.rpartition(" ")[2]) for line in printed[-1].splitlines()[:2])
    assert last < first - 0.1
