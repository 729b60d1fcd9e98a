"""An import that is put off: it is not made, and what was to be imported works as before."""

from tests.small import python

PROGRAM = """
import sys
from tight_fit.command.wrapper import importing
with importing():
    from transformers.loss.loss_for_object_detection import linear_sum_assignment
assert "scipy.optimize" not in sys.modules
print(*linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])[1])
import scipy.optimize
assert scipy.optimize.linear_sum_assignment is not linear_sum_assignment
for name in [name for name in sys.modules if name.startswith("scipy.optimize")]:
    del sys.modules[name]
with importing():
    from scipy.optimize import linear_sum_assignment, minimize_scalar
print(round(minimize_scalar(lambda x: (x - 2) ** 2).x, 6))
"""


def test_the_matching_is_imported_when_it_is_called_and_all_else_at_once():
    done = python("-c", PROGRAM)
    # by hand: 1 + 2 + 2 is the least of the six sums
    assert done.stdout.split() == ["1", "0", "2", "2.0"], done.stderr
