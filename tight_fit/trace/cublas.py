"""Which operands of a matrix product cuBLAS cannot read, so that a GPU copies them first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tight_fit.torch_private import is_dense

# Matrix products by cuBLAS -> which argument is the first of the two matrices.
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}


def copied_for_cublas(operands: Sequence[object]) -> list[torch.Tensor]:
    """Those of the two operands of a matrix product that a GPU copies first.

    cuBLAS reads a matrix whose rows or whose columns lie in one piece (prepare_matrix_for_cublas in
    ATen/native/cuda/Blas.cpp). Such is not the gradient of a sum, one element that stands for all.
    """
    return [
        operand
        for operand in operands[:2]
        if isinstance(operand, torch.Tensor) and operand.dim() >= 2 and not _read_by_cublas(operand)
    ]


def _read_by_cublas(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, across) = matrix.shape[-2:], matrix.stride()[-2:]
    if is_dense(matrix) if matrix.dim() == 2 else matrix.is_contiguous():
        return True
    return (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns))
