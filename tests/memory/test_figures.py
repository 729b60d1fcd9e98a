"""Figures of plans and runs say in words what they show, and need no colour to be read."""

import matplotlib

matplotlib.use("agg")

from IPython.core.formatters import DisplayFormatter

from helpers import plots
from helpers.memory.figures import COLOURS, EDGE, HATCHES
from helpers.plan import plan
from helpers.recipe import Recipe
from helpers.units import size


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours by WCAG 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_plans_figures_say_its_numbers_and_notebooks_get_them():
    planned = plan(Recipe(batch_size=8, length=32))
    for figure in (
        plots.timeline({"mini": planned}),
        plots.categories({"mini": planned}, gpu="T4"),
    ):
        assert f"mini: peak of {size(planned.peak)} in the {planned.peak_phase}" in figure.alt
        for name, count in planned.at_peak.items():
            assert f"{name} {size(count)}" in figure.alt
        assert repr(figure).startswith("<Figure size")
        _, metadata = DisplayFormatter().format(figure)
        assert metadata["image/png"]["alt"] == figure.alt
    assert "the T4 has 14.6 GiB" in figure.alt


def test_figures_of_runs_say_their_numbers():
    figure = plots.losses({"before": [2.0, 1.0, 0.5]}, smooth=1)
    assert "before: from 2 to 0.5 in 3 steps" in figure.alt
    assert "a 1.5" in plots.bars({"a": [1.0, 2.0]}, "seconds").alt


def test_categories_differ_without_colour():
    assert contrast("#000000", "#FFFFFF") == 21
    for light in ("#FFFFFF", COLOURS["activations"], COLOURS["temporaries"]):
        assert contrast(EDGE, light) >= 3
    hatched = [HATCHES[name] for name in ("gradients", "optimizer states", "temporaries")]
    assert len(set(hatched)) == 3 and all(hatched)
