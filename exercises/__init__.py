"""The exercises, one module a notebook: `nb02.py` holds 02.1, 02.2, ...; `exercises.check` loads it when asked.

from exercises.check import close, exercise

@exercise("02.1", hints=["Count the rows first.", "Divide by the micro-batch."], why="Why it matters.")
def _(answer):
    close(answer, truth(), rel=0.01, unit="GiB")  # or: assert condition, "One sentence on what is wrong."
"""
