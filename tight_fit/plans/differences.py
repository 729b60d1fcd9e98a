"""Numbers that are lines over the examples and parabolas over the tokens, by their differences.

Nothing here imports PyTorch.
"""

from __future__ import annotations

import numpy as np


def differences(columns: list[list[int]], single: bool) -> list[list[int]]:
    """[coefficients, numbers]: of each number its first value and its differences (Newton).

    single  whether all columns are of one example
    """
    rows = 1 if single else 2
    table = np.array(columns, dtype=object).reshape(rows, len(columns) // rows, -1)
    table[1:] -= table[:-1]
    for last in range(1, table.shape[1]):
        table[:, last:] = table[:, last:] - table[:, last - 1 : -1]
    return [list(row) for row in table.reshape(-1, table.shape[-1])]


def evaluated(
    numbers: list[list[int]],
    single: bool,
    step: int,
    more: int,
    longer: int,
    times: int = 1,
    part: int = 1,
) -> list[int] | None:
    """`times` / `part` of each number, `more` examples and `longer` tokens from the first place,
    in whole numbers; None where one of them is none. `step` tokens lie between two columns."""
    rows = 1 if single else 2
    table = np.array(numbers, dtype=object).reshape(rows, len(numbers) // rows, -1)
    along = table[0] if single else table[0] + table[1] * more
    unit, total = part, along[0] * times
    if len(along) > 1:
        unit = 2 * step * step * part
        total = total * (2 * step * step) + along[1] * (2 * step * longer * times)
    if len(along) > 2:
        total += along[2] * (longer * (longer - step) * times)
    return None if unit > 1 and (total % unit).any() else list(total // unit)
