"""Drawings of ideas, one module per lesson, all in the style of `helpers.schematics.drawing`.

A lesson imports its own module and shows a drawing with one call:

    from helpers.schematics import accumulation

    accumulation.micro_batches()
"""
