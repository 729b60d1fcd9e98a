"""An import that is put off: it is not made, and what was to be imported works as before."""

import subprocess
import sys

DEFERRED = """
import sys
from tight_fit.command.wrapper import importing
with importing():
    from transformers.loss.loss_for_object_detection import linear_sum_assignment
assert "scipy.optimize" not in sys.modules
print(*linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])[1])
import scipy.optimize
assert scipy.optimize.linear_sum_assignment is not linear_sum_assignment
"""
OTHERS = """
import sys
from tight_fit.command.wrapper import importing
with importing():
    from scipy.optimize import linear_sum_assignment, minimize_scalar
print(round(minimize_scalar(lambda x: (x - 2) ** 2).x, 6))
"""


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_matching_is_imported_when_it_is_called():
    assert printed(DEFERRED) == "1 0 2"  # by hand: 1 + 2 + 2 is the least of the six sums


def test_all_else_of_the_module_is_imported_at_once():
    assert float(printed(OTHERS)) == 2.0
