"""The course as a static site in build/site: `make site`, which is `python -m tools.site`.

Sphinx with MyST-NB makes the pages (the pair on which Jupyter Book 1 stands): both come from PyPI,
read saved outputs without running anything, search without a server, and need neither Node nor a
network. Formulas become MathML when the site is built, so that a page loads nothing but its files.
"""
