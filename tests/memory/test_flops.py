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


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("key_heads", [HEADS, 2])
def test_every_head_of_queries_is_multiplied(name, key_heads):
    """Scores and sums of values; their two gradients each, and scores again (recomputed)."""
    backward, operation = name.endswith("backward"), getattr(torch.ops.aten, name)
    queries = torch.empty(BATCH, HEADS, TOKENS, WIDTH)
    keys, values = (torch.empty(BATCH, key_heads, KEYS, WIDTH) for _ in range(2))
    operands = [queries.clone()] * backward + [queries, keys, values]
    counted = FORMULAS[operation](*operands, 0.0, True, out_val=None)
    assert counted == (5 if backward else 2) * PRODUCT
    if key_heads == HEADS and operation in flop_registry:  # PyTorch has none for the CPU
        assert counted == flop_registry[operation](*operands)
    else:
        assert key_heads < HEADS or "for_cpu" in name


@pytest.mark.parametrize(
    "left, right, products",
    [((10, 4), (3, 4, 5), 10 * 4 * 5), ((3, 10, 4), (3, 4, 5), 3 * 10 * 4 * 5)],
    ids=["rows of all experts", "as many rows for each"],
)
def test_a_row_is_multiplied_with_its_own_expert_alone(left, right, products):
    formula = FORMULAS[torch.ops.aten._grouped_mm]
    assert formula(torch.empty(left), torch.empty(right), out_val=None) == 2 * products
