"""The search of a layout for mixtures of experts: what it tries, its bounds, its words."""

import json
import re
from dataclasses import replace

import pytest
from transformers import GptOssConfig, LlamaConfig, MixtralConfig, OlmoeConfig, Qwen3MoeConfig

from tests.search.test_search import below, found_of, planned
from tight_fit.command import search_report
from tight_fit.command.main import main
from tight_fit.layouts import seconds as step_time
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import Layout, parse
from tight_fit.models.step import ModelStep
from tight_fit.search.experts import NO_EXPERTS, Experts
from tight_fit.search.layouts import search_layouts
from tight_fit.search.space import Reference, Trial, layouts_of, least_seconds

SIZES = {"vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
EIGHT = Cluster("H100", 8, inside="NVLink 4")
SLOW = Cluster("A100-40GB", 2, 2, "PCIe 3 x16", "Ethernet 1 Gbit")


def mixtral(width=64, layers=2, experts=8):
    return MixtralConfig(
        **SIZES, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_local_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip


def olmoe(width=64):
    return OlmoeConfig(
        **SIZES, hidden_size=width, intermediate_size=width // 2, num_hidden_layers=2,
        num_experts=16, num_experts_per_tok=4,
    )  # fmt: skip


LARGE = mixtral(6144)  # 3.6 G parameters, too many for one GPU; few layers, for a quick plan
QWEN = Qwen3MoeConfig(
    **SIZES, hidden_size=128, head_dim=32, intermediate_size=512, moe_intermediate_size=64,
    num_hidden_layers=3, num_experts=16, num_experts_per_tok=4, mlp_only_layers=[0],
)  # fmt: skip
GPT_OSS = GptOssConfig(
    **SIZES, hidden_size=64, head_dim=16, intermediate_size=96, num_hidden_layers=2,
    num_local_experts=8,
)  # fmt: skip
LLAMA = LlamaConfig(**SIZES, hidden_size=64, intermediate_size=176, num_hidden_layers=2)


def job(config, **fields):
    usual = {"batch_size": 16, "length": 64, "weights": "fp32", "precision": "bf16"}
    return ModelStep(config, **usual | fields)


def of_experts(cluster, experts):
    return [layout for layout in layouts_of(cluster, experts) if layout.expert > 1]


@pytest.mark.parametrize(
    "cluster, experts, tried",
    [
        (EIGHT, 128, ["fsdp=8,expert=2", "fsdp=8,expert=4", "fsdp=8,expert=8"]),
        (EIGHT, 60, ["fsdp=8,expert=2", "fsdp=8,expert=4"]),
        (EIGHT, 7, []),
        (Cluster("H100", 4, 2), 8, ["fsdp=8,expert=2", "fsdp=8,expert=4", "fsdp=8,expert=8"]),
        (Cluster("H100", 1, 4), 8, ["fsdp=4,expert=4"]),
        (Cluster("H100"), 8, []),
    ],
    ids=str,
)
def test_expert_ranks_divide_a_machine_or_are_all_and_divide_the_experts(cluster, experts, tried):
    found = of_experts(cluster, experts)
    assert [str(layout) for layout in found] == tried
    assert [parse(text) for text in tried] == found
    others = [layout for layout in layouts_of(cluster, experts) if layout.expert == 1]
    assert others == layouts_of(cluster)


def test_experts_of_a_model():
    hidden, inner = 64, 128
    assert Experts.of(job(mixtral())) == Experts(8, 2 * 8 * 3 * hidden * inner, hidden)
    dense_first = Experts.of(job(QWEN))
    assert dense_first == Experts(16, 2 * 16 * 3 * 128 * 64, 128)
    assert Experts.of(job(LLAMA)) == NO_EXPERTS
    too_long = ModelStep(LLAMA, length=2 * LLAMA.max_position_embeddings)
    assert Experts.of(too_long) == NO_EXPERTS, "the plan of each layout says why"
    with pytest.raises(ValueError, match="Experts with biases or norms, as in this gpt_oss"):
        Experts.of(job(GPT_OSS))


def test_links_of_the_layouts_that_are_tried():
    """Expert ranks are neighbours; those with the same experts are as many ranks apart."""
    cluster = Cluster("H100", 8, 2, "NVLink 4", "InfiniBand 400 Gbit", cards=8)
    card = cluster.between.speed
    for layout in of_experts(cluster, 64):
        links = cluster.links_of_axes(layout.axes)
        if layout.expert == 16:
            assert links["expert"].speed == pytest.approx(card * 15 / 8)  # 8 of 15 leave
        else:
            assert links["expert"] is cluster.inside
            assert links["expert_data"].speed == min(8 * card / layout.expert, cluster.inside.speed)
    for layout in of_experts(EIGHT, 64):
        assert set(EIGHT.links_of_axes(layout.axes).values()) == {EIGHT.inside}


@pytest.mark.parametrize(
    "config, cluster, fields, recomputed",
    [
        # Weights are most of a step, or tokens are.
        pytest.param(
            *(mixtral(1024), EIGHT, {"batch_size": 8, "length": 16}, ("none", "full")),
            marks=pytest.mark.night,
        ),
        pytest.param(
            *(mixtral(512), EIGHT, {"batch_size": 8, "length": 1024}, ("none", "selective")),
            marks=pytest.mark.night,
        ),
        (olmoe(256), SLOW, {"batch_size": 4, "length": 256}, ("full",)),
        (QWEN, SLOW, {"batch_size": 8, "precision": "fp32"}, ("none",)),  # two micro-batches too
    ],
    ids=["wide", "long", "olmoe", "fp32"],
)
def test_bounds_are_below_what_is_planned(config, cluster, fields, recomputed):
    of = job(config, **fields)
    layouts = [Layout(cluster.gpus, "ddp"), *of_experts(cluster, Experts.of(of).number)]
    for recompute in recomputed:
        assert len(below(of, cluster, layouts, recompute)) >= len(layouts) > 2


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bounds_are_below_ddp_whose_weights_are_computed_with_as_they_are(dtype):
    """Nothing is held in place of the weights that FSDP2, from whose plan bounds are taken, gathers
    beside the activations; of a model without experts."""
    wide = LlamaConfig(**LLAMA.to_dict() | {"hidden_size": 1024, "intermediate_size": 2816})
    of = job(wide, batch_size=8, length=16, weights=dtype, precision=dtype)
    assert len(below(of, EIGHT, [Layout(8, "ddp")], "none")) == 1


@pytest.mark.parametrize("config", [mixtral(), olmoe()], ids=["mixtral", "olmoe"])
def test_the_bound_of_messages_is_below_those_that_are_sent(config):
    """Their bytes alone, over links that take nearly all of the step."""
    of = job(config, batch_size=8, length=256)
    experts = Experts.of(of)
    like = Reference.of(planned(Trial(Layout(4)), of), SLOW.gpu, experts)
    # In each of two layers every token goes to its experts.
    chosen = config.num_experts_per_tok
    assert like.dispatched == 2 * chosen * 2 * 256 * config.hidden_size
    waits = replace(like, work=0.0, growing=0.0, products=0.0)
    for layout in of_experts(SLOW, experts.number):
        seconds = facts_of(planned(Trial(layout), of), SLOW)["seconds"]
        assert seconds / 3 < least_seconds(Trial(layout), of, waits, SLOW) < seconds, str(layout)


def test_bounds_never_hide_the_best():
    """Short texts over slow links: it takes less to send tokens than to gather experts."""
    of = job(LARGE, length=32)
    quick, every = (
        search_layouts(of, SLOW, ("none",), 1, bounds=bounds) for bounds in (True, False)
    )
    assert quick.best.trial == every.best.trial == Trial(Layout(4, expert=4))
    assert quick.best.facts == every.best.facts
    assert len(quick.planned) < len(every.planned)
    for one in every.planned:
        assert quick.slower.get(one.trial, 0) <= one.seconds


def test_experts_that_are_not_planned_are_searched_without_expert_ranks():
    found = search_layouts(job(GPT_OSS), Cluster("H100", 2), ("none",), 1)
    assert found.best and "Experts with biases or norms" in found.left_out["expert ranks"]
    trials = [one.trial for one in found.planned] + [*found.slower, *found.too_large]
    assert trials and not any(trial.layout.expert > 1 for trial in trials)


FSDP, EXPERT = Layout(4), Layout(4, expert=2)


@pytest.mark.parametrize(
    "other, seconds, wins, says",
    [
        (Trial(FSDP), 1.04, True, "within the 5% .* divides the experts over ranks as well"),
        (Trial(FSDP, "full"), 1.04, True, "within the 5% .* divides the experts over ranks"),
        (Trial(FSDP), 1.06, False, "it is 6% slower"),
        (Trial(Layout(1, "ddp")), 1.04, True, "has 2 axes of ranks more"),
        (Trial(Layout(4, expert=4)), 0.99, True, "1.0% slower, within the 5% .* is no simpler"),
    ],
)
def test_a_tie_goes_to_undivided_experts(other, seconds, wins, says):
    found = found_of((Trial(EXPERT), 1.0, -1), (other, seconds, -1))
    assert found.best.trial == (other if wins else Trial(EXPERT))
    answer = search_report.answer(found)
    assert re.search(says, answer), answer
    assert answer.endswith(search_report.UNMEASURED)
    assert search_report.UNMEASURED not in search_report.answer(found_of((Trial(FSDP), 1.0, -1)))


def test_every_axis_has_words_for_what_limits_a_step():
    assert set(step_time.AXES) <= set(search_report.AXES)
    found = found_of((Trial(EXPERT), 1.0, -1))
    found.planned[0].facts["limit"] = "expert"
    assert "Expert messages limit it: 100% of the step is work." in search_report.answer(found)


def test_the_command_names_a_layout_that_can_be_typed(tmp_path, capsys):
    path = tmp_path / "config.json"
    values = LARGE.to_dict() | {"architectures": ["MixtralForCausalLM"]}
    path.write_text(json.dumps(values))
    words = [str(path), "--gpu", "A100-40GB", "--batch", "16", "--length", "32", "--gpus", "4"]
    words += ["--machines", "2", "--inside", "PCIe 3 x16", "--between", "Ethernet 1 Gbit"]
    words += ["--accumulation", "1", "--recompute", "full", "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    winner = facts["winner"]
    assert winner["layout"] == "fsdp=4,expert=4" and winner["balanced"]
    assert facts["answer"].startswith("Take fsdp=4,expert=4, full recomputation: ")
    assert "--layout fsdp=4,expert=4" in winner["command"]
