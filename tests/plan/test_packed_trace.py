"""A trace as text, and back."""

import pytest

from helpers.plan import plan
from helpers.plan.packed_trace import COLUMNS, PackedTrace
from helpers.recipe import Recipe
from tight_fit.kernels.step_seconds import seconds
from tight_fit.kernels.traced_ops import TracedOps


def test_packed_and_unpacked_it_is_the_same_trace():
    traced = plan(Recipe("vit", batch_size=8, accumulation=4, precision="fp16")).operations
    packed = PackedTrace.of(traced)
    again = PackedTrace(packed.lines)
    assert again.traced == traced and again == packed and hash(again) == hash(packed)
    assert seconds(again.traced, "T4") == seconds(traced, "T4")
    assert max(map(len, packed.lines)) <= COLUMNS and sum(map(len, packed.lines)) < 6000


def test_nothing_and_other_traces():
    empty = PackedTrace.of(TracedOps())
    assert empty.traced == TracedOps() and empty != "text"
    assert empty != PackedTrace.of(TracedOps(tf32=True))


@pytest.mark.parametrize("lines", (["no base64!"], ["AAAA"], []))
def test_what_is_no_trace_is_refused(lines):
    with pytest.raises(ValueError, match="not a packed trace .*make it anew"):
        assert PackedTrace(lines).traced
