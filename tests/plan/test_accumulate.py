"""A comparison of full models is cut into micro-batches that the GPU which is here can hold."""

import pytest

from helpers.plan import fitting, plan
from helpers.recipe import Recipe, difference, replace
from tight_fit import gpus
from tight_fit.units import GIB

LARGE = Recipe("deberta-large", profile="full", batch_size=16, length=256)


@pytest.fixture
def card(monkeypatch):
    def of(gib):
        gpu = gpus.GPU(f"a GPU of {gib} GiB", int(gib * GIB), (7, 5))
        monkeypatch.setattr(gpus, "here", lambda: gpu)
        return gpu

    return of


def test_both_arms_get_the_same_micro_batches(card, capsys):
    """The start of lesson 19 on a T4, beside an arm that would fit in fewer micro-batches."""
    gpu = card(14.56)
    start, small = fitting(LARGE, replace(LARGE, checkpointing=True))
    assert difference(start, small) == {"checkpointing": (False, True)}
    assert difference(LARGE, start) == {"accumulation": (1, 4)}
    assert plan(start).fits(gpu) and not plan(replace(start, accumulation=2)).fits(gpu)
    said = capsys.readouterr().out
    assert said == "To fit a GPU of 14.56 GiB, each step runs in 4 micro-batches of 4, by plan.\n"


def test_what_fits_or_is_mini_stays_as_it_is_and_where_nothing_fits_it_is_said(card, capsys):
    card(40)
    assert fitting(LARGE) == [LARGE]
    card(0.1)
    mini = Recipe("decoder", batch_size=6)
    assert fitting(mini, replace(mini, loss="chunked")) == [mini, replace(mini, loss="chunked")]
    assert not capsys.readouterr().out
    assert fitting(replace(LARGE, batch_size=2)) == [replace(LARGE, batch_size=2, accumulation=2)]
    assert "even in 2 micro-batches: set TIGHT_FIT_PROFILE=mini" in capsys.readouterr().out


@pytest.mark.parametrize("gib", [11.76, 14.56, 22.03])
@pytest.mark.night
def test_the_language_models_of_lessons_20_and_21_fit(gib, card):
    gpu, full = card(gib), Recipe("decoder", profile="full")
    frozen = replace(full, padding="dynamic", checkpointing=True, frozen=14)
    lora = replace(full, lora_rank=8, lora_targets="all-linear")
    for arms in ((frozen, replace(frozen, loss="chunked")), (lora, replace(lora, base="nf4"))):
        before, after = (plan(arm).fits(gpu) for arm in fitting(*arms))
        assert before and after and after.need < 0.9 * before.need  # there is a saving to see
