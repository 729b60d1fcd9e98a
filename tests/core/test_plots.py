"""Figures of plans and runs say in words what they show, and need no colour to be read."""

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from helpers import plots
from helpers.plan import plan
from helpers.recipe import Recipe
from tight_fit.command.alt_text import numbers
from tight_fit.command.told_apart import told_apart
from tight_fit.units import size


def test_figures_of_plans_and_runs_say_their_numbers_and_notebooks_get_them():
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
    figure = plots.losses({"before": [2.0, 1.0, 0.5]}, smooth=1)
    assert "before: from 2 to 0.5 in 3 steps" in figure.alt
    assert "a 1.5" in plots.bars({"a": [1.0, 2.0]}, "seconds").alt


def test_a_plain_figure_gets_words_and_its_numbers():
    figure, (left, right) = plt.subplots(1, 2)
    left.plot([1, 2, 4], [0.5, np.nan, 12345.6], label="long")
    left.axhline(7, label="limit")
    left.axvline(3)  # without a name
    left.plot([1, 2], [1, 2], "o")  # dots without a name
    left.set(title="Title", xlabel="ranks", ylabel="GiB")
    left.set_xticks([1, 4], ["one", "four"])
    right.barh(["a", "b"], [1.5, 2], label="bars")
    right.barh(["a", "b"], [3, 4], left=[1.5, 2])
    right.set_xlabel("MiB")
    shown = plots.described(figure, "Bars beside a curve.")
    assert shown is figure and not plt.get_fignums()
    assert figure.alt == (
        "Bars beside a curve. Title, GiB over ranks: long: 0.5 at one, 12,346 at four; limit 7. "
        "MiB: bars: 1.5 at a, 2 at b; 3 at a, 4 at b."
    )
    _, metadata = DisplayFormatter().format(shown)
    assert metadata["image/png"]["alt"] == figure.alt and repr(shown).startswith("<Figure size")
    with pytest.raises(ValueError, match="whole sentence"):
        plots.described(figure, "Loss")
    with pytest.raises(TypeError, match="matplotlib figure, not Axes"):
        plots.described(left, "The loss of a step.")


def test_long_curves_areas_and_names_are_told_by_their_ends_and_extremes():
    figure, (left, right) = plt.subplots(1, 2)
    x = np.arange(10)
    left.plot(x, -((x - 4.0) ** 2), label="hill")
    left.stackplot(x, [x + 1.0, np.full(10, 2.0)], labels=["first", "second"])
    left.errorbar([0, 1], [5, 6], yerr=[1, 1], label="means")
    left.hexbin(x, x)
    right.plot([1, 2], ["x", "y"], "o", label="dots")
    right.plot([], [], label="none")
    right.set(xlim=(0, 1), ylim=(0, 1), xlabel="names")
    plt.close(figure)
    assert numbers(figure) == (
        "Values: hill: from -16 at 0, to -25 at 9, highest 0 at 4; means: 5 at 0, 6 at 1; "
        "first: from 1 at 0, to 10 at 9; second: from 2 at 0, to 2 at 9. "
        "names: dots: x at 1, y at 2; none: nothing."
    )


def in_legend(figure, what):
    return [what(handle) for handle in figure.axes[0].get_legend().legend_handles]


def test_curves_that_only_colours_tell_apart_get_dashes_in_the_legend_as_well():
    figure, axis = plt.subplots()
    for count, colour in enumerate(plots.LINES[:3]):
        axis.plot([0, 1], [0, count], "o-", color=colour, label=f"curve {count}")
    axis.plot([0, 1], [1, 3], "--", color="black", label="another")
    axis.plot([0, 1], [2, 3], "s-", color=plots.LINES[0], label="with another marker")
    axis.legend()
    plt.close(figure)
    told_apart(figure)
    styles = [line.get_linestyle() for line in axis.lines]
    assert styles == ["-", "-.", ":", "--", "-"]
    assert in_legend(figure, lambda handle: handle.get_linestyle()) == styles


def test_bars_that_only_colours_tell_apart_get_hatches_and_rows_without_a_name_too():
    figure, axis = plt.subplots()
    parts = {"parameters": "#0072B2", "gradients": "#D55E00", "sent": "#CC79A7", "kept": "#56B4E9"}
    for row in (0, 1):
        for place, (name, colour) in enumerate(parts.items()):
            axis.barh(row, 1, left=place, color=colour, label=None if row else name)
    axis.legend()
    plots.described(figure, "Two rows of four bars.")
    hatches = [container.patches[0].get_hatch() or "" for container in axis.containers]
    assert hatches[:4] == hatches[4:] and hatches[:2] == ["", "////"]
    assert len(set(hatches[1:4])) == 3 and all(hatches[1:4])
    assert in_legend(figure, lambda handle: handle.get_hatch() or "") == hatches[:4]
