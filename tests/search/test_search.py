"""The search of a layout: its bounds, its ranking, its words, and what it refuses."""

import json
import re
import shlex
from dataclasses import replace

import pytest
from transformers import BertConfig, LlamaConfig

from tests.night import few_by_day
from tests.small import configured
from tight_fit.command import layout_report, search_report
from tight_fit.command.main import main
from tight_fit.gpus import NCCL
from tight_fit.layouts.cluster import Cluster
from tight_fit.layouts.facts import facts_of
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import plan_layout, plan_step
from tight_fit.memory.plan import fit_on_gpu
from tight_fit.models import config as hf_config
from tight_fit.models.step import ModelStep
from tight_fit.search.experts import Experts
from tight_fit.search.layouts import PlannedTrial, Searched, search_layouts
from tight_fit.search.space import (
    TIE,
    Reference,
    Trial,
    accumulations,
    layouts_of,
    least_need,
    least_peak,
    least_seconds,
    reference_layout,
)

LLAMA = configured(LlamaConfig, 64, 3, 4, 176, 512, num_key_value_heads=2)
BERT = configured(BertConfig, 64, 3, 4, 128, 512, max_position_embeddings=256)
CONFIGS = {"llama": LLAMA, "bert": BERT}
EIGHT = Cluster("H100", 8, inside="NVLink 4")
TWO = Cluster("A100-40GB", 2, 2, "NVLink 3", "InfiniBand 200 Gbit", cards=2)


def job(kind="llama", **fields):
    usual = {"batch_size": 16, "length": 64, "weights": "fp32", "precision": "bf16"}
    return ModelStep(CONFIGS[kind], **usual | fields)


def planned(trial, of, reduce="fp32"):
    selective = trial.recompute == "selective"
    return plan_step(trial.step(of), trial.layout, selective=selective, reduce=reduce)


def test_layouts_of_two_machines_are_those_that_can_be_asked_for():
    found = layouts_of(TWO)
    assert [str(layout) for layout in found] == [
        "ddp=1",
        "ddp=4",
        "zero1=4",
        "zero2=4",
        "fsdp=4",
        "hsdp=2x2",
        "fsdp=2,tensor=2",
        "fsdp=2,context=2",
        "hsdp=2x1,context=2",
        "pipeline=2,fsdp=2",
    ]
    assert [parse(str(layout)) for layout in found] == found
    inside = [str(layout) for layout in layouts_of(Cluster("A100-40GB", 4))]
    assert inside[-4:] == ["fsdp=2,tensor=2", "fsdp=2,context=2", "tensor=4", "context=4"]
    assert layouts_of(Cluster("T4")) == [Layout(1, "ddp")]
    assert all(layout.ranks in (1, 6) for layout in layouts_of(Cluster("T4", 6)))


def test_micro_batches_divide_and_what_another_layout_does_is_left_out():
    of = job(batch_size=24)
    assert accumulations(Layout(4), of, 4, None) == [1, 2, 3, 6]
    assert accumulations(Layout(4, "zero1"), of, 4, None) == [2, 3, 6]
    assert accumulations(Layout(2, context=2), of, 4, None) == [4, 12]
    assert accumulations(Layout(4), of, 4, 3) == [3] and accumulations(Layout(4), of, 4, 4) == []


def test_zero_2_keeps_weights_as_fsdp_without_resharding_does():
    """Why there is one trial for both, and none of ZeRO-1 with one micro-batch."""
    plans = [
        plan_layout(LLAMA, layout, batch_size=8, length=32)
        for layout in (Layout(4, "zero2"), Layout(4, reshard=False), Layout(4, "zero1"))
    ]
    for other in plans[1:]:
        assert (plans[0].timeline == other.timeline).all() and plans[0].sent == other.sent


def below(of, cluster, layouts, recompute, take=slice(None), reduce="fp32"):
    """{trial: planned seconds}; each needs and takes at least what its bounds say."""
    like = Reference.of(
        planned(Trial(reference_layout(of, cluster.gpus), recompute), of),
        cluster.gpu,
        Experts.of(of),
    )
    seconds = {}
    for layout in layouts:
        for number in accumulations(layout, of, cluster.gpus, None)[take]:
            trial = Trial(layout, recompute, number)
            plan = planned(trial, of, reduce)
            assert least_peak(trial, of, like, reduce) <= plan.peak, str(trial)
            seconds[trial] = facts_of(plan, cluster)["seconds"]
            assert least_seconds(trial, of, like, cluster, reduce) <= seconds[trial], str(trial)
    return seconds


@pytest.mark.parametrize("kind", ["bert", pytest.param("llama", marks=pytest.mark.night)])
def test_bounds_are_below_what_is_planned(kind):
    of = job(kind, length=256, batch_size=8)
    layouts = [
        layout
        for layout in layouts_of(TWO)
        if layout.pipeline == 1 and (kind == "llama" or layout.tensor == layout.context == 1)
    ]
    most = slice(-1, None)  # of micro-batches
    plain, recomputed = below(of, TWO, layouts, "none"), below(of, TWO, layouts, "full", most)
    assert (len(plain), len(recomputed)) == ((13, 6) if kind == "bert" else (18, 9))
    seconds = plain | recomputed
    pairs = [(more, less) for more in seconds for less in seconds if more.adds_work_to(less)]
    assert len(pairs) > 20 and all(seconds[more] >= seconds[less] for more, less in pairs)


def test_bounds_know_in_which_dtype_gradients_are_summed():
    """With stage 1 of ZeRO they are whole while micro-batches go on: most of this model."""
    of = ModelStep(configured(LlamaConfig, 512, 2, 8, 1408, 256), 8, 8, precision="bf16")
    layouts = [Layout(4, "zero1"), Layout(4, "zero2")]
    found = below(of, TWO, layouts, "none", slice(-1, None), reduce="bf16")
    assert [trial.accumulation for trial in found] == [2, 2]


@pytest.mark.parametrize("length", few_by_day([512, 32]))
def test_bounds_are_below_what_is_planned_for_wide_layers(length):
    """Where matrix products are most of a step, and where weights and states are most of it."""
    wide = configured(LlamaConfig, 2048, 2, 16, 5632, 1024, num_key_value_heads=4)
    of = ModelStep(wide, 16, length, weights="fp32", precision="bf16")
    cluster = Cluster("A100-40GB", 4)
    layouts = [Layout(1, "ddp"), Layout(4), Layout(2, tensor=2), Layout(1, tensor=4)]
    assert len(below(of, cluster, layouts, "none", slice(0, None, 2))) == 10


def test_the_bound_of_messages_is_below_those_that_are_sent():
    slow = Cluster("A100-40GB", 2, 2, "PCIe 3 x16", "Ethernet 1 Gbit")
    of = job(batch_size=8, length=256)
    like = Reference.of(planned(Trial(Layout(4)), of), "A100-40GB")
    waits = replace(like, work=0.0, growing=0.0, products=0.0)
    for layout in layouts_of(slow)[1:-1]:  # three layers are no pipeline of two stages
        for number in accumulations(layout, of, 4, None)[-1:]:
            trial = Trial(layout, "none", number)
            seconds = facts_of(planned(trial, of), slow)["seconds"]
            assert 0 < least_seconds(trial, of, waits, slow) < seconds, str(trial)
    one = least_seconds(Trial(Layout(1, "ddp")), of, like, slow)
    assert one == pytest.approx(0.9 * 4 * like.growing)


def found_of(*trials):
    """A search in which these were planned: (trial, seconds, bytes over the GPU's memory)."""
    memory = 100
    return Searched(
        job(),
        TWO,
        [
            PlannedTrial(
                trial,
                {
                    "fits": over <= 0,
                    "need": memory + over,
                    "card_memory": memory,
                    "seconds": seconds,
                    "seconds_of_work": seconds,
                    "seconds_of_bubble": 0.0,
                    "seconds_waiting": {},
                    "tokens_per_second": None,
                    "limit": "compute",
                },
            )
            for trial, seconds, over in trials
        ],
    )


FSDP, TENSOR = Layout(4), Layout(2, tensor=2)


@pytest.mark.parametrize(
    "other, seconds, wins, says",
    [
        (Trial(TENSOR), 0.96, False, "4.0% faster, within the 5% .* it has 1 axis of ranks more"),
        (Trial(TENSOR), 0.94, True, "it is 6% slower, with 60.0 ms more work"),
        (Trial(Layout(4, "zero2")), 1.04, True, "within the 5% .* shards more of the model"),
        (Trial(Layout(4, "zero2"), "full"), 0.97, False, "recomputes more .full in place of none"),
        (Trial(Layout(4, "zero2"), "none", 2), 0.97, False, "takes 2 micro-batches in place of 1"),
        (Trial(Layout(1, "ddp")), 1.06, False, "it is 6% slower"),
        (Trial(Layout(1, "ddp")), 1.04, True, "has 1 axis of ranks more"),
    ],
)
def test_a_tie_goes_to_the_simplest(other, seconds, wins, says):
    found = found_of((Trial(FSDP), 1.0, -1), (other, seconds, -1))
    assert found.best.trial == (other if wins else Trial(FSDP))
    assert {found.best.trial, found.runner_up.trial} == {other, Trial(FSDP)}
    assert re.search(says, search_report.answer(found)), search_report.answer(found)


def test_what_cannot_win():
    found = found_of((Trial(FSDP, "selective"), 1.0, -1), (Trial(FSDP), 0.1, 5))
    assert found.fastest == 1.0
    assert found.cannot_win(Trial(TENSOR), 1 / (1 + TIE))
    assert not found.cannot_win(Trial(TENSOR), 0.95)
    assert not found.cannot_win(Trial(Layout(4, "zero2")), 1.04), "simpler, and within the tie"
    assert found.cannot_win(Trial(Layout(4, "zero2")), 1.06)
    assert not found_of().cannot_win(Trial(TENSOR), 99.0)


def test_the_runner_up_has_another_layout_where_there_is_one():
    same = (Trial(FSDP, "full"), 1.2, -1)
    assert found_of((Trial(FSDP), 1.0, -1), same).runner_up.trial == same[0]
    other = (Trial(TENSOR), 1.3, -1)
    assert found_of((Trial(FSDP), 1.0, -1), same, other).runner_up.trial == other[0]
    assert found_of((Trial(FSDP), 1.0, -1)).runner_up is None
    assert "Nothing else that fits" in search_report.answer(found_of((Trial(FSDP), 1.0, -1)))


def test_bounds_say_something():
    """They lie below what is planned, and not far: else every layout would be planned."""
    of = job("bert", length=256, batch_size=8)
    like = Reference.of(planned(Trial(reference_layout(of, 4)), of), TWO.gpu, Experts.of(of))
    shares = {Trial(Layout(4, "ddp"), "none", 2): 0.6, Trial(Layout(4), "none", 1): 0.9}
    for trial, share in shares.items():
        plan = planned(trial, of)
        assert share * plan.peak < least_peak(trial, of, like) <= plan.peak, str(trial)
        need = fit_on_gpu(TWO.gpu, int(least_peak(trial, of, like)), 0).need
        assert least_need(trial, of, like, TWO) == need + NCCL
    one = Trial(Layout(1, "ddp"))
    alone = fit_on_gpu(TWO.gpu, int(least_peak(one, of, like)), 0).need
    assert least_need(one, of, like, TWO) == alone


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


def test_a_text_that_is_too_long_for_the_model_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="^No layout of 4 GPUs .* longer than the 2048 tokens"):
        search_layouts(job(batch_size=1, length=4096), Cluster("A100-40GB", 4), ("none",))


def test_one_long_example_is_divided_over_all_gpus():
    """Data ranks have nothing to divide then: tensor or context ranks do."""
    found = search_layouts(job(batch_size=1, length=2048), Cluster("A100-40GB", 4), ("none",))
    assert {str(one.trial.layout) for one in found.planned} == {"ddp=1", "context=4"}
    assert "2 key and value heads" in found.left_out["tensor=4"]
    assert len(found.left_out) == 7
    assert "a step of 1 example of 2048 tokens" in search_report.answer(found)


SMALL = LLAMA.to_dict() | {"num_hidden_layers": 2, "architectures": ["LlamaForCausalLM"]}
STEP = ["--gpu", "A100-40GB", "--batch", "8", "--length", "64"]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "of a user.json"  # a name that a shell would take for three
    path.write_text(json.dumps(SMALL))
    return str(path)


def test_the_command_answers_and_its_own_command_gives_the_same(model, capsys):
    searched = [model, *STEP, "--gpus", "2", "--recompute", "selective", "--accumulation", "2"]
    assert main([*searched, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["answer"].startswith("Take ") and "The runner-up is" in facts["answer"]
    assert {row["recompute"] for row in facts["ranked"]} == {"selective"}
    assert {row["accumulation"] for row in facts["ranked"]} == {2}
    for key in ("winner", "runner_up"):
        words = shlex.split(facts[key].pop("command"))
        assert words[:2] == ["tight-fit", model]
        assert main([*words[1:], "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        # One GPU is planned by itself, not as one of the two.
        alone = {"cluster"} if facts[key]["gpus"] == 1 else set()
        same = facts[key].keys() - alone
        assert {name: again[name] for name in same} == {name: facts[key][name] for name in same}
    assert facts["winner"]["seconds"] == facts["ranked"][0]["seconds"]


def test_the_text(model, capsys):
    assert main([model, "--gpu", "T4", "--gpus", "2", "--length", "32", "--checkpointing"]) == 0
    said = capsys.readouterr().out
    assert "computed in fp16" in said and "16 examples of 32" in said  # a T4 has no bf16
    assert "What fits, the best first" in said and "\ntight-fit " in said
    assert "none" not in said.lower()


def test_what_one_gpu_cannot_hold_is_said_with_what_is_missing(tmp_path, capsys):
    path = tmp_path / "config.json"
    large = SMALL | {"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 8}
    path.write_text(json.dumps(large))
    step = ["--gpu", "GTX 1650", "--batch", "2", "--length", "32", "--precision", "fp32"]
    assert main([str(path), *step, "--gpus", "2", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["winner"] is None and facts["answer"].startswith("Nothing fits")
    assert facts["too_large"]["fsdp=2"] > 0 and facts["plans"] <= 3
    least = 12 * 2 * 8 * 10**8 - 4 * 2**30  # 2.15 G parameters, 12 bytes of each
    assert facts["too_large"]["one GPU"] > least


def in_blocks(size, counts):
    """Bytes of tensors of so many numbers in blocks of 512 bytes, as CUDA's allocator has them."""
    return sum(-(-size * count // 512) * 512 for count in counts)


ADAPTERS = ["--lora", "4", "--targets", "all-linear", "--rslora"]
ADAPTERS += ["--recompute", "full", "--accumulation", "1"]


@pytest.mark.parametrize(
    "base, weights, held, header",
    [
        (["--base", "bf16"], "bf16", 2, "bf16 weights, frozen; fp32 adapters of rank 4 (all-"),
        (["--base", "nf4"], "bf16", None, "weights in 4 bits (NF4), bf16 where they are not"),
    ],
    ids=["bf16", "nf4"],
)
def test_adapters_are_laid_out_over_copies_of_the_model(model, capsys, base, weights, held, header):
    """Bytes of the base and of the messages by hand."""
    assert main([model, *STEP, "--gpus", "4", *ADAPTERS, *base, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    whole = {"ddp=1", "ddp=4"}
    divided = {"zero1=4", "zero2=4", "fsdp=4"}
    assert {row["layout"] for row in facts["ranked"]} == whole | divided
    left_out = {"tensor=2", "tensor=4", "context=2", "context=4"}
    assert {name.split(",")[-1] for name in facts["left_out"]} == left_out
    # A layer has q, k, v, o and the three of its MLP; there are half as many heads of k and v.
    pairs = ((64, 64), (64, 32), (64, 32), (64, 64), (64, 176), (64, 176), (176, 64))
    adapters = [4 * width for pair in 2 * pairs for width in pair]
    matrices = [rows * columns for rows, columns in 2 * pairs]
    others = [512 * 64] * 2 + [64] * 5  # embeddings, head and norms
    best = facts["winner"], facts["runner_up"]
    own = next(found for found in best if found["gpus"] == 4)
    layout = ["--gpus", "4", "--layout", "ddp=4"]
    assert main([model, *STEP, *layout, *ADAPTERS, *base, "--json"]) == 0
    copies = json.loads(capsys.readouterr().out)
    for found in (copies, *(found for found in best if found["layout"] in whole)):
        assert (found["weights"], found["lora_rank"]) == (weights, 4)
        of_base = found["at_peak"]["parameters"] - in_blocks(4, adapters)
        if held:
            rotary = [8, 8]  # frequencies in fp32, in two buffers
            assert of_base == in_blocks(held, matrices + others) + in_blocks(4, rotary)
        else:  # half a byte of each number, and a few blocks of scales beside each matrix
            scales = of_base - in_blocks(2, others) - in_blocks(0.5, matrices)
            assert 0 < scales <= len(matrices) * 8 * 512
        assert found["parameters"] == sum(adapters + matrices) + sum(others)
        if found["gpus"] == 4:  # each rank sends its gradients of adapters twice, but for its part
            assert found["sent"]["data"]["all_reduce"] == 4 * sum(adapters) * 2 * 3 / 4
    assert main([*shlex.split(own.pop("command"))[1:], "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {name: again[name] for name in own} == own
    for found in (again, copies):
        assert (
            header.replace("weights,", found["reduce"] and "shards," or "weights,")
            in (layout_report.lines_of(found, model)[0])
        )


def test_adapters_that_fit_nowhere_are_told_what_saves(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"hidden_size": 4096, "intermediate_size": 65536}))
    step = ["--gpu", "GTX 1650", "--batch", "2", "--length", "32", "--gpus", "2", *ADAPTERS]
    assert main([str(path), *step, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["winner"] is None and facts["too_large"].keys() >= {"one GPU", "ddp=2"}
    assert facts["answer"].endswith(
        "Take more or larger GPUs, shorter examples or a base in 4 bits (--base nf4)."
    )


def test_what_is_missing_is_said_of_layouts_of_which_nothing_fits():
    found = found_of(
        (Trial(FSDP), 1.0, -1), (Trial(FSDP, "full"), 2.0, 3), (Trial(TENSOR), 1.0, 9),
        (Trial(TENSOR, "full"), 1.0, 4),
    )  # fmt: skip
    assert search_report._missing(found) == {str(Trial(TENSOR)): 4.0}
