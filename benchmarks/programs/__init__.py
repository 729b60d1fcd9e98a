"""Training programs of other people, planned unchanged and run for real on a CPU.

No program is kept here: `python -m benchmarks.programs FOLDER` runs those that lie in a folder of
clones, and benchmarks/data/programs.json says what came out (`table`).
"""
