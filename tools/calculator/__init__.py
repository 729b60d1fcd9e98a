"""The calculator: a page that says, without Python and without a server, whether a step fits.

`python -m tools.calculator.make` plans well-known models and keeps their plans in `plans.json.xz`.
A plan is kept as what happens, in order, to the storages of a step (`stream`), with the size of
each storage as a product of powers of the examples, the tokens and the rank of LoRA (`sizes`). So
the page plans any batch and length exactly, by the same rules as `helpers.measure`.
"""
