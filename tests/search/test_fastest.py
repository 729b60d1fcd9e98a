"""The fastest combination that fits: the same as by trying all, and what it says of each change."""

import itertools
import json
import re

import pytest
import transformers as library

from helpers.plan import remedies_of
from helpers.recipe import Recipe, replace
from tests.small import configured
from tight_fit import gpus
from tight_fit.command.main import main
from tight_fit.gpus import find
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model_step
from tight_fit.search import fastest as module
from tight_fit.search.fastest import TIE, fastest
from tight_fit.search.remedies import Remedies
from tight_fit.units import MIB

MINI = Recipe("vit", batch_size=16)


def by_trying_all(recipe: Recipe, gpu: gpus.GPU) -> list[tuple[float, dict]]:
    """(seconds, change) of every combination that fits, without any bound."""
    remedies, found = remedies_of(recipe, gpu), []
    for precision, optimizer, again, parts in itertools.product(
        ("fp32", "fp16"), ("adamw", "adamw8bit"), (False, True), (1, 2, 4, 8, 16)
    ):
        change = {"precision": precision, "optimizer": optimizer, "checkpointing": again}
        change |= {"accumulation": parts}
        if remedies.fits(change):
            found.append((remedies.plan(change).seconds(gpu).total, change))
    return found


def test_it_is_as_fast_as_the_fastest_of_all_combinations():
    """On a GPU with 5 MiB less than the step needs."""
    turing = find("T4")
    need = remedies_of(MINI, turing).plan().fits(turing).need
    gpu = gpus.GPU("T4", int(need - 5 * MIB), turing.capability)
    found = fastest(remedies_of(MINI, gpu))
    every = by_trying_all(MINI, gpu)
    assert found.change is not None and found.left == 0 and found.tried <= 8
    assert found.seconds <= (1 + TIE) * min(seconds for seconds, _ in every)
    assert found.change in [
        {name: value for name, value in change.items() if getattr(MINI, name) != value}
        for _, change in every
    ]
    assert set(found.reasons) == set(found.change)


def test_its_seconds_are_those_of_a_plan_of_that_step(monkeypatch):
    """Eight micro-batches, whose memory two and four tell, are traced for their seconds."""
    monkeypatch.setattr(module, "SAVERS", ({},))
    config = configured(library.LlamaConfig, 64, 1, 4, 128, 512, num_key_value_heads=2)
    step, turing = ModelStep(config, batch_size=16, length=64), find("T4")
    half = {"precision": "fp16", "accumulation": 8}
    need = Remedies(step, turing).plan(half).fits(turing).need
    remedies = Remedies(step, gpus.GPU("T4", int(need) + 1, turing.capability))
    found, alone = fastest(remedies), plan_model_step(replace(remedies.step, **half))
    assert (found.change, found.seconds) == (half, alone.seconds(turing).total)


def test_what_is_not_needed_is_not_changed():
    """Plenty of room, and a step that is launch-bound: nothing makes it 5 % faster."""
    small = replace(MINI, batch_size=8)
    found = fastest(remedies_of(small, find("A100-40GB")))
    assert found.change == {} and found.reasons == {}
    assert "the step as asked" in found.lines("A100-40GB", lambda *pair: "")[0]


def test_half_precision_is_found_where_products_take_the_time():
    large = Recipe("vit", profile="full", batch_size=16)
    found = fastest(remedies_of(large, find("T4")))
    assert found.change == {"precision": "fp16"}
    assert re.fullmatch(r".* without it, \d\.\d\d times as long\.", found.reasons["precision"])


def test_nothing_fits_and_too_many(monkeypatch):
    gpu = gpus.GPU("T4", gpus.CONTEXT, (7, 5))
    found = fastest(remedies_of(MINI, gpu))
    assert found.change is None and found.seconds is None
    assert found.lines("T4", str)[0] == "No combination fits the T4."
    monkeypatch.setattr(module, "MOST_PLANS", 1)
    bounded = fastest(remedies_of(MINI, find("T4")))
    assert bounded.left > 0 and f"{bounded.left} more were left out" in bounded.lines("T4", str)[-1]


def test_the_host_is_tried_last_and_only_where_nothing_fits_without():
    """Nearly all of this step are weights and what AdamW keeps of them."""
    config = configured(library.LlamaConfig, 256, 1, 4, 512, 8192, num_key_value_heads=2)
    step = ModelStep(config, batch_size=1, length=16, weights="fp32")
    need = Remedies(step, find("T4")).plan({"offload": "optimizer"}).fits(find("T4")).need
    small = gpus.GPU("T4", need, find("T4").capability)
    remedies = Remedies(step, small)
    for precision, optimizer, again, loss in itertools.product(
        ("fp32", "fp16"), ("adamw", "adamw8bit"), (False, True), ("full", "chunked")
    ):
        change = {"precision": precision, "optimizer": optimizer, "checkpointing": again}
        assert not remedies.fits(change | {"loss": loss})
    found = fastest(remedies)
    assert found.change is not None and found.change["offload"] == "optimizer"
    on_host = [{"offload": "optimizer", "precision": kind} for kind in ("fp32", "fp16")]
    assert found.seconds <= (1 + TIE) * min(
        remedies.plan(change).seconds(small).total for change in on_host if remedies.fits(change)
    )
    assert "without it the GPU has" in found.reasons["offload"]
    assert "optimizer or activations on the host" in found.lines("T4", lambda *pair: "")[-1]
    larger = fastest(remedies.for_gpu(find("T4")))
    assert larger.change is not None and "offload" not in (*larger.change, *larger.fields)


def test_what_nobody_plans_is_refused():
    with pytest.raises(TypeError, match="step is no ModelStep but a Recipe: give `planning`"):
        Remedies(MINI, find("T4")).changes()
    with pytest.raises(ValueError, match="gpu='Mine' is not known"):
        fastest(remedies_of(MINI, gpus.GPU("Mine", 2**34, (8, 0))))


def test_the_command_prints_it(tmp_path, capsys):
    configured(library.BertConfig, 64, 2, 4, 128, 512).save_pretrained(tmp_path)
    asked = ["--model", str(tmp_path), "--gpu", "T4", "--batch", "4", "--length", "32", "--fastest"]
    assert main(asked) == 0
    text = capsys.readouterr().out
    assert "The fastest that fits the T4: " in text and "Searched: precision" in text
    assert main([*asked, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["fastest"]
    assert facts["seconds"] > 0 and set(facts["reasons"]) == set(facts["change"])
