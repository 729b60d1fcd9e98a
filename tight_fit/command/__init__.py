"""The command `tight-fit`: what was asked, its answer, and how it is written down."""
