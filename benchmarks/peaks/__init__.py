"""The plan against peaks of GPU memory that others measured and published.

The protocol, for every point:

1. The set-up is written first, from the published script as far as it was seen: the model, the
   dtypes, the order of the calls, the number of examples and tokens. What was not seen and had to
   be assumed is said in the module of the source, or above the rows of data/peaks.csv where the
   source needs no module. It is committed before its plan is seen.
2. The step is planned after that. The errors are kept in data/peaks.json and published in
   docs/accuracy.md as they are.
3. Which rows of a published table are taken is decided by a rule that does not look at plans: all
   rows, or, of the long tables of transformers' pages, the first, the middle and the last.
4. No point is left out after its plan was seen, with one exception: the set-up proves not to be
   what was measured. Such a point stays, with the reason, in `benchmarks.peaks.points.LEFT_OUT`.

benchmarks/data/peaks.csv holds the points, and a module the set-ups of one kind of source.
`python -m benchmarks.peaks` plans all points, keeps the results and writes the page.
"""
