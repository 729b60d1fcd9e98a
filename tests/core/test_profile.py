"""The profile: full models on a GPU that holds them, mini ones elsewhere, or what is asked for."""

import pytest

from helpers import profile
from helpers.plan import plan
from helpers.recipe import Recipe
from tight_fit import gpus


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(profile.VARIABLE)


def test_full_models_run_on_a_gpu_that_holds_them_and_mini_ones_on_a_small_one(monkeypatch):
    monkeypatch.setattr(gpus, "_probed", (True, ""))
    for name, chosen, why in (
        ("A100-80GB", "full", "; TIGHT_FIT_PROFILE=mini"),
        ("T4", "full", "; TIGHT_FIT_PROFILE=mini"),
        ("RTX 4060 Laptop", "mini", ", and its 7.75 GiB are less than the 10.00 GiB of full"),
    ):
        monkeypatch.setattr(gpus, "here", lambda name=name: gpus.find(name))
        found = profile.choose()
        assert (found.name, found.device) == (chosen, "cuda")
        assert found.reason.startswith(f"a GPU is here: {name}{why}")
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
    chosen = profile.choose()
    assert (chosen.name, chosen.device) == ("mini", "cpu") and gpus.NO_GPU in chosen.reason
    monkeypatch.setenv(profile.VARIABLE, "huge")
    with pytest.raises(ValueError, match="use mini or full"):
        profile.choose()
