"""The profile: full models on a GPU that holds them, mini ones elsewhere, or what is asked for."""

import pytest

from helpers import profile
from helpers.plan import plan
from helpers.recipe import Recipe
from tight_fit import gpus


@pytest.fixture
def card(monkeypatch):
    def of(name):
        monkeypatch.setattr(gpus, "_probed", (True, ""))
        monkeypatch.setattr(gpus, "here", lambda: gpus.find(name))
        monkeypatch.delenv(profile.VARIABLE, raising=False)

    return of


@pytest.mark.parametrize("name", ["RTX 3060", "T4", "A100-80GB"])
def test_full_models_run_on_a_gpu_that_holds_them(name, card):
    card(name)
    reason = f"a GPU is here: {name}; TIGHT_FIT_PROFILE=mini overrides it"
    assert profile.choose() == profile.Profile("full", "cuda", reason)


@pytest.mark.parametrize("name, memory", [("GTX 1650", "3.81"), ("RTX 4060 Laptop", "7.75")])
def test_a_small_gpu_runs_the_mini_models_and_says_why(name, memory, card, monkeypatch):
    card(name)
    assert profile.choose() == profile.Profile(
        "mini",
        "cuda",
        f"a GPU is here: {name}, and its {memory} GiB are less than the 10.00 GiB of full models; "
        "TIGHT_FIT_PROFILE=full overrides it",
    )
    assert profile.recipe("deberta").profile == "mini"
    monkeypatch.setenv(profile.VARIABLE, "full")
    assert profile.choose() == profile.Profile("full", "cuda", "chosen by TIGHT_FIT_PROFILE=full")


def test_enough_is_what_the_step_of_most_lessons_needs():
    first = plan(Recipe("deberta", profile="full"))
    need = first.fits("RTX 3060").need
    assert 0.9 * profile.ENOUGH < need < profile.ENOUGH and not first.fits("8GB")


def test_without_a_gpu_it_is_mini(monkeypatch):
    monkeypatch.setattr(gpus, "_probed", (False, gpus.NO_GPU))
    monkeypatch.setattr(gpus, "_seems_to_be_here", lambda: False)
    monkeypatch.delenv(profile.VARIABLE, raising=False)
    chosen = profile.choose()
    assert (chosen.name, chosen.device) == ("mini", "cpu") and gpus.NO_GPU in chosen.reason
    monkeypatch.setenv(profile.VARIABLE, "huge")
    with pytest.raises(ValueError, match="use mini or full"):
        profile.choose()
