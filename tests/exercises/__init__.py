"""Tests of the exercises."""

# Those whose check plans full-size models, which takes seconds.
FULL_SIZE = ("00.1", "00.2", "00.4", "02.2", "03.1", "03.2", "03.4", "05.4", "19.1", "19.2")
