"""The search of a layout: what it tries, its ranking, its words, and what it refuses."""

import json
import re
import shlex

import pytest
from transformers import GptOssConfig

from tests.search import EIGHT, LLAMA, SLOW, TWO, found_of, job, llama, mixtral
from tests.small import configured
from tight_fit.command import layout_report, search_report
from tight_fit.command.main import main
from tight_fit.layouts import seconds as step_time
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.layout import Layout, parse
from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep
from tight_fit.search.experts import NO_EXPERTS, Experts
from tight_fit.search.layouts import Searched, _Work, family_of, search_layouts
from tight_fit.search.space import TIE, Trial, accumulations, layouts_of

GPT_OSS = configured(
    GptOssConfig, 64, 2, 4, 96, 512, num_key_value_heads=2, head_dim=16, num_local_experts=8
)
FSDP, TENSOR, EXPERT = Layout(4), Layout(2, tensor=2), Layout(4, expert=2)
PIPELINE = Layout(2, pipeline=2)


@pytest.mark.parametrize(
    "cluster, experts, tried",
    [
        (TWO, 1, "ddp=1 ddp=4 zero1=4 zero2=4 fsdp=4 hsdp=2x2 fsdp=2,tensor=2 fsdp=2,context=2 "
         "hsdp=2x1,context=2 pipeline=2,fsdp=2"),
        (Cluster("A100-40GB", 4), 1, "ddp=1 ddp=4 zero1=4 zero2=4 fsdp=4 fsdp=2,tensor=2 "
         "fsdp=2,context=2 tensor=4 context=4"),
        (Cluster("T4"), 1, "ddp=1"),
        # Expert ranks divide a machine or are all, and divide the experts.
        (EIGHT, 128, "fsdp=8,expert=2 fsdp=8,expert=4 fsdp=8,expert=8"),
        (EIGHT, 60, "fsdp=8,expert=2 fsdp=8,expert=4"),
        (EIGHT, 7, ""),
        (Cluster("H100", 4, 2), 8, "fsdp=8,expert=2 fsdp=8,expert=4 fsdp=8,expert=8"),
        (Cluster("H100", 1, 4), 8, "fsdp=4,expert=4"),
    ],
    ids=str,
)  # fmt: skip
def test_layouts_are_those_that_can_be_asked_for(cluster, experts, tried):
    found = layouts_of(cluster, experts)
    asked = [layout for layout in found if experts == 1 or layout.expert > 1]
    assert " ".join(map(str, asked)) == tried
    assert [parse(text) for text in tried.split()] == asked
    assert [layout for layout in found if layout.expert == 1] == layouts_of(cluster)
    # A pipeline has a stage in each machine.
    stages = {layout.pipeline for layout in found}
    assert stages == ({1, cluster.machines} if len(found) > 1 else {1})


def test_micro_batches_divide_and_what_another_layout_does_is_left_out():
    of = job(batch_size=24)
    assert accumulations(Layout(4), of, 4, None) == [1, 2, 3, 6]
    assert accumulations(Layout(4, "zero1"), of, 4, None) == [2, 3, 6]
    assert accumulations(Layout(2, context=2), of, 4, None) == [4, 12]
    assert accumulations(Layout(4), of, 4, 3) == [3] and accumulations(Layout(4), of, 4, 4) == []
    of = job(batch_size=48)
    assert accumulations(PIPELINE, of, 4, None) == [2, 3, 4, 6, 8]  # of 24, up to 4 per stage
    assert accumulations(PIPELINE, of, 4, 1) == [] and accumulations(PIPELINE, of, 4, 2) == [2]


def test_more_micro_batches_may_make_a_pipeline_faster():
    few, many = (Trial(PIPELINE, "none", number) for number in (2, 4))
    assert not many.adds_work_to(few) and family_of(many) != family_of(few)
    assert Trial(PIPELINE, "full", 2).adds_work_to(few)
    assert few.axes == 2
    one, two = (Trial(FSDP, "none", number) for number in (1, 2))
    assert two.adds_work_to(one) and family_of(two) == family_of(one)


def test_experts_of_a_model():
    hidden, inner = 64, 128
    assert Experts.of(job(mixtral(64))) == Experts(8, 2 * 8 * 3 * hidden * inner, hidden)
    assert Experts.of(job()) == NO_EXPERTS
    too_long = ModelStep(LLAMA, length=2 * LLAMA.max_position_embeddings)
    assert Experts.of(too_long) == NO_EXPERTS, "the plan of each layout says why"
    with pytest.raises(ValueError, match="Experts with biases or norms, as in this gpt_oss"):
        Experts.of(job(GPT_OSS))


SHARDS_MORE = Layout(4, "zero2")


@pytest.mark.parametrize(
    "first, other, seconds, wins, says",
    [
        (FSDP, Trial(TENSOR), 0.96, False, "4.0% faster, within the 5% .* it has 1 axis of ranks"),
        (FSDP, Trial(TENSOR), 0.94, True, "it is 6% slower, with 60.0 ms more work"),
        (FSDP, Trial(SHARDS_MORE), 1.04, True, "within the 5% .* shards more of the model"),
        (FSDP, Trial(SHARDS_MORE, "full"), 0.97, False, "recomputes more .full in place of none"),
        (FSDP, Trial(SHARDS_MORE, "none", 2), 0.97, False, "takes 2 micro-batches in place of 1"),
        (FSDP, Trial(Layout(1, "ddp")), 1.06, False, "it is 6% slower"),
        (FSDP, Trial(Layout(1, "ddp")), 1.04, True, "has 1 axis of ranks more"),
        (
            EXPERT,
            Trial(FSDP, "full"),
            1.04,
            True,
            "within the 5% .* divides the experts over ranks",
        ),
        (EXPERT, Trial(FSDP), 1.06, False, "it is 6% slower"),
        (EXPERT, Trial(Layout(1, "ddp")), 1.04, True, "has 2 axes of ranks more"),
        (EXPERT, Trial(Layout(4, expert=4)), 0.99, True, "1.0% slower, .* is no simpler"),
    ],
)
def test_a_tie_goes_to_the_simplest(first, other, seconds, wins, says):
    found = found_of((Trial(first), 1.0, -1), (other, seconds, -1))
    assert found.best.trial == (other if wins else Trial(first))
    assert {found.best.trial, found.runner_up.trial} == {other, Trial(first)}
    answer = search_report.answer(found)
    assert re.search(says, answer), answer
    assert answer.endswith(search_report.UNMEASURED) == (first == EXPERT)


def test_what_can_be_tried_is_not_left_out():
    work = _Work(Searched(job(llama(64), batch_size=8), SLOW), "fp32", str, bounds=False)
    work.fill(("none",), None)
    tried = {str(Trial(layout)) for layout, *_ in work.open}
    assert "pipeline=2,fsdp=2" in tried and not tried & set(work.found.left_out)


def test_what_cannot_win():
    found = found_of((Trial(FSDP, "selective"), 1.0, -1), (Trial(FSDP), 0.1, 5))
    assert found.fastest == 1.0
    assert found.cannot_win(Trial(TENSOR), 1 / (1 + TIE))
    assert not found.cannot_win(Trial(TENSOR), 0.95)
    assert not found.cannot_win(Trial(SHARDS_MORE), 1.04), "simpler, and within the tie"
    assert found.cannot_win(Trial(SHARDS_MORE), 1.06)
    assert not found_of().cannot_win(Trial(TENSOR), 99.0)


def test_the_runner_up_has_another_layout_where_there_is_one():
    best, same, other = (Trial(FSDP), 1.0, -1), (Trial(FSDP, "full"), 1.2, -1), Trial(TENSOR)
    assert found_of(best, same).runner_up.trial == same[0]
    assert found_of(best, same, (other, 1.3, -1)).runner_up.trial == other
    assert found_of(best).runner_up is None
    assert "Nothing else that fits" in search_report.answer(found_of(best))


def test_every_axis_has_words_for_what_limits_a_step():
    assert set(step_time.AXES) <= set(search_report.AXES)
    found = found_of((Trial(EXPERT), 1.0, -1))
    found.planned[0].facts["limit"] = "expert"
    assert "Expert messages limit it: 100% of the step is work." in search_report.answer(found)


def test_what_is_missing_is_said_of_layouts_of_which_nothing_fits():
    found = found_of(
        (Trial(FSDP), 1.0, -1), (Trial(FSDP, "full"), 2.0, 3), (Trial(TENSOR), 1.0, 9),
        (Trial(TENSOR, "full"), 1.0, 4),
    )  # fmt: skip
    assert search_report._missing(found) == {str(Trial(TENSOR)): 4.0}


@pytest.mark.night
def test_eight_billion_parameters_on_eight_h100s_are_laid_out_as_torchtitan_did():
    """FSDP over all, two examples of 8,192 tokens per GPU, selective recomputation."""
    of = ModelStep(
        hf_config.read("meta-llama/Llama-3.1-8B"), 16, 8192, weights="fp32", precision="bf16"
    )
    found = search_layouts(of, EIGHT)
    assert found.best.trial == Trial(Layout(8), "selective")
    assert len(found.planned) <= 14 and not found.bounded
    assert found.runner_up.trial.axes == 2
    assert "ddp=8" in search_report.report_of(found, "x", {})["too_large"]


def test_one_long_example_is_divided_over_all_gpus():
    """Data ranks have nothing to divide then: tensor or context ranks do."""
    found = search_layouts(job(batch_size=1, length=2048), Cluster("A100-40GB", 4), ("none",))
    assert {str(one.trial.layout) for one in found.planned} == {"ddp=1", "context=4"}
    assert "2 key and value heads" in found.left_out["tensor=4"]
    assert len(found.left_out) == 7
    assert "a step of 1 example of 2048 tokens" in search_report.answer(found)
    with pytest.raises(ValueError, match="^No layout of 4 GPUs .* longer than the 2048 tokens"):
        search_layouts(job(batch_size=1, length=4096), Cluster("A100-40GB", 4), ("none",))


@pytest.mark.parametrize(
    "of, cluster, accumulation, left_out, reason",
    [
        (job(batch_size=4), SLOW, 2, "pipeline=2,fsdp=2", "divided evenly over 2 stages"),
        (job(llama(64), batch_size=8), SLOW, 1, "pipeline=2,fsdp=2", "2 to 8 micro-batches"),
        (job(GPT_OSS), Cluster("H100", 2), 1, "expert ranks", "Experts with biases or norms"),
    ],
    ids=["three layers", "one micro-batch", "biases"],
)
def test_what_cannot_be_laid_out_is_left_out_with_its_reason(
    of, cluster, accumulation, left_out, reason
):
    found = search_layouts(of, cluster, ("none",), accumulation)
    assert found.best and reason in found.left_out[left_out]
    tried = [one.trial for one in found.planned] + [*found.slower, *found.too_large]
    assert not any(trial.layout.expert > 1 or trial.layout.pipeline > 1 for trial in tried)


SMALL = LLAMA.to_dict() | {"num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}
STEP = ["--gpu", "A100-40GB", "--batch", "8", "--length", "64"]


@pytest.fixture
def command(tmp_path, capsys):
    """A function that plans a model, by its configuration, and gives (status, facts)."""
    path = tmp_path / "of a user.json"  # a name that a shell would take for three

    def run(values, *words):
        path.write_text(json.dumps(values))
        status = main([str(path), *words, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def as_typed(facts, command, values=SMALL):
    """The facts of the command that is named for a layout, of which these are the facts."""
    words = shlex.split(facts.pop("command"))
    assert words[0] == "tight-fit"
    status, again = command(values, *words[2:])
    # One GPU is planned by itself, not as one of the two.
    same = facts.keys() - ({"cluster"} if facts["gpus"] == 1 else set())
    assert status == 0 and {key: again[key] for key in same} == {key: facts[key] for key in same}
    return again


def test_the_command_answers_and_its_own_command_gives_the_same(command):
    asked = [*STEP, "--gpus", "2", "--recompute", "selective", "--accumulation", "2"]
    status, facts = command(SMALL, *asked)
    assert status == 0
    assert facts["answer"].startswith("Take ") and "The runner-up is" in facts["answer"]
    assert {row["recompute"] for row in facts["ranked"]} == {"selective"}
    assert {row["accumulation"] for row in facts["ranked"]} == {2}
    assert facts["winner"]["seconds"] == facts["ranked"][0]["seconds"]
    for key in ("winner", "runner_up"):
        as_typed(facts[key], command)


@pytest.mark.parametrize(
    "config, name, layout, options",
    [
        (mixtral(6144), "MixtralForCausalLM", "fsdp=4,expert=4", "1 --recompute full"),
        (llama(8192, 4, 64, num_key_value_heads=8), "LlamaForCausalLM", "pipeline=2,fsdp=2",
         "2 --recompute full"),
    ],
    ids=["experts", "a pipeline"],
)  # fmt: skip
def test_over_slow_links_tokens_or_layers_are_divided(config, name, layout, options, command):
    """3.5 G parameters, too many for one GPU; few layers, so that a plan takes seconds."""
    step = ["--gpu", "A100-40GB", "--batch", "16", "--length", "32", "--gpus", "4"]
    step += ["--machines", "2", "--inside", "PCIe 3 x16", "--between", "Ethernet 1 Gbit"]
    values = config.to_dict() | {"architectures": [name]}
    status, facts = command(values, *step, "--accumulation", *options.split())
    winner = facts["winner"]
    assert status == 0 and winner["layout"] == layout
    assert f"--layout {layout}" in winner["command"] and f"Take {layout}" in facts["answer"]
    assert winner["balanced"] if "expert" in layout else winner["seconds_of_bubble"] > 0


def test_the_text(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    asked = [str(path), "--gpu", "T4", "--gpus", "2", "--length", "32", "--checkpointing"]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert "computed in fp16" in said and "16 examples of 32" in said  # a T4 has no bf16
    assert "What fits, the best first" in said and "\ntight-fit " in said
    assert "none" not in said.lower()


ADAPTERS = ["--lora", "4", "--targets", "all-linear", "--rslora"]
ADAPTERS += ["--recompute", "full", "--accumulation", "1"]


def test_what_fits_nowhere_is_said_with_what_is_missing(command):
    large = SMALL | {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 8}
    step = ["--gpu", "GTX 1650", "--batch", "2", "--length", "32", "--gpus", "2"]
    status, facts = command(large, *step, "--precision", "fp32")
    assert status == 1
    assert facts["winner"] is None and facts["answer"].startswith("Nothing fits")
    assert facts["too_large"]["fsdp=2"] > 0 and facts["plans"] <= 3
    least = 12 * 2 * 8 * 10**8 - 4 * 2**30  # 2.15 G parameters, 12 bytes of each
    assert facts["too_large"]["one GPU"] > least
    status, facts = command(large | {"intermediate_size": 65536}, *step, *ADAPTERS)
    assert status == 1 and facts["too_large"].keys() >= {"one GPU", "ddp=2"}
    assert facts["answer"].endswith(
        "Take more or larger GPUs, shorter examples or a base in 4 bits (--base nf4)."
    )


def in_blocks(size, counts):
    """Bytes of tensors of so many numbers in blocks of 512 bytes, as CUDA's allocator has them."""
    return sum(-(-size * count // 512) * 512 for count in counts)


# A layer has q, k, v, o and the three of its MLP; there are half as many heads of k and v.
PAIRS = 2 * ((64, 64), (64, 32), (64, 32), (64, 64), (64, 176), (64, 176), (176, 64))
LORA = [4 * width for pair in PAIRS for width in pair]  # numbers of an adapter of rank 4
MATRICES = [rows * columns for rows, columns in PAIRS]
OTHERS = [512 * 64] * 2 + [64] * 5  # embeddings, head and norms


@pytest.mark.parametrize(
    "base, header",
    [
        ("bf16", "bf16 shards, frozen; fp32 adapters of rank 4 (all-"),
        ("nf4", "weights in 4 bits (NF4), bf16 where they are not"),
    ],
)
def test_adapters_are_laid_out_over_copies_of_the_model(base, header, command):
    """Bytes of the base and of the messages by hand."""
    asked = [*STEP, "--gpus", "4", *ADAPTERS, "--base", base]
    _, facts = command(SMALL, *asked)
    layouts = {"ddp=1", "ddp=4", "zero1=4", "zero2=4", "fsdp=4"}
    assert {row["layout"] for row in facts["ranked"]} == layouts
    left_out = {"tensor=2", "tensor=4", "context=2", "context=4"}
    assert {name.split(",")[-1] for name in facts["left_out"]} == left_out
    _, copies = command(SMALL, *asked, "--layout", "ddp=4")
    held = copies["at_peak"]["parameters"] - in_blocks(4, LORA)
    if base == "bf16":
        rotary = [8, 8]  # frequencies in fp32, in two buffers
        assert held == in_blocks(2, MATRICES + OTHERS) + in_blocks(4, rotary)
    else:  # half a byte of each number, and a few blocks of scales beside each matrix
        scales = held - in_blocks(2, OTHERS) - in_blocks(0.5, MATRICES)
        assert 0 < scales <= len(MATRICES) * 8 * 512
    assert copies["parameters"] == sum(LORA + MATRICES + OTHERS)
    # Each rank sends its gradients of adapters twice, but for its part.
    assert copies["sent"]["data"]["all_reduce"] == 4 * sum(LORA) * 2 * 3 / 4
    own = next(one for one in (facts["winner"], facts["runner_up"]) if one["gpus"] == 4)
    for found in (as_typed(own, command), copies):
        line = layout_report.lines_of(found, "of a user.json")[0]
        assert (header if found["reduce"] else header.replace("shards,", "weights,")) in line
