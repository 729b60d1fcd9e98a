"""`make mutants`: whether tests notice when the code is wrong, by a fixed sample of small errors.

`operators` makes them, `sample` draws them, `reach` writes down which tests reach which lines, and
`run` gives every mutant to the tests that reach its line.
"""
