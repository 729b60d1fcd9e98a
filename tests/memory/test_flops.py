"""FLOPs of attention and of experts are those of the products that are written out by hand."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from tight_fit.trace.flops import FORMULAS, KERNELS

BATCH, HEADS, TOKENS, KEYS, WIDTH = 2, 6, 8, 12, 4
PRODUCT = 2 * BATCH * HEADS * TOKENS * KEYS * WIDTH  # of scores, or of their sums of values
OPERATIONS = [
    name
    for kernel in KERNELS
    for name in (f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward")
    if hasattr(torch.ops.aten, name)
]


def operands(key_heads, backward):
    queries = torch.empty(BATCH, HEADS, TOKENS, WIDTH)
    keys, values = (torch.empty(BATCH, key_heads, KEYS, WIDTH) for _ in range(2))
    return [queries.clone()] * backward + [queries, keys, values]


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
def test_every_head_of_queries_is_multiplied(name, key_heads):
    """Scores and sums of values; their two gradients each, and scores again (recomputed)."""
    backward = name.endswith("backward")
    formula = FORMULAS[getattr(torch.ops.aten, name)]
    counted = formula(*operands(key_heads, backward), 0.0, True, out_val=None)
    assert counted == (5 if backward else 2) * PRODUCT


@pytest.mark.parametrize("name", OPERATIONS)
def test_with_as_many_heads_of_keys_it_is_torchs_own_count(name):
    operation = getattr(torch.ops.aten, name)
    if operation not in flop_registry:
        assert "for_cpu" in name  # PyTorch has none for the CPU
        return
    given = operands(HEADS, name.endswith("backward"))
    assert FORMULAS[operation](*given, out_val=None) == flop_registry[operation](*given)


@pytest.mark.parametrize(
    "left, right, products",
    [((10, 4), (3, 4, 5), 10 * 4 * 5), ((3, 10, 4), (3, 4, 5), 3 * 10 * 4 * 5)],
    ids=["rows of all experts", "as many rows for each"],
)
def test_a_row_is_multiplied_with_its_own_expert_alone(left, right, products):
    formula = FORMULAS[torch.ops.aten._grouped_mm]
    assert formula(torch.empty(left), torch.empty(right), out_val=None) == 2 * products
