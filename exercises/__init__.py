"""The exercises: `nb02.py` holds 02.1, 02.2, and so on, and `exercises.check` loads it when asked.

from exercises.check import exercise
from exercises.comparisons import close

@exercise("02.1", hints=["Count the examples first.", "Divide."], why="Why it matters.")
def _(answer):
    close(answer, truth(), rel=0.01, unit="GiB")  # or: assert condition, "What is wrong."
"""
