"""`python -m tight_fit`: what it prints, what it answers, how it ends."""

import os
import shlex

import pytest
import transformers as library
from hypothesis import given
from hypothesis import strategies as st

from tests.small import ROOT, python
from tight_fit import gpus
from tight_fit.command import question
from tight_fit.command.answer import step_of
from tight_fit.command.options import parser
from tight_fit.plans.model import ModelStep, plan_model, plan_model_step
from tight_fit.search.largest import LIMIT, largest_that_fits
from tight_fit.search.remedies import Remedies


@pytest.fixture
def of_folder(folder):
    """A function: the step of the small decoder with these fields."""
    return lambda **fields: ModelStep(library.LlamaConfig.from_pretrained(folder), **fields)


@pytest.fixture
def small(monkeypatch):
    """A GPU with 20 MiB beside CUDA's context and what cuBLAS takes: a toy does not fit it."""
    memory = gpus.CONTEXT + 2 * int(8.125 * 2**20) + 20 * 2**20
    gpu = gpus.GPU("Small", memory, (7, 5))
    for table in (gpus.GPUS, gpus.KNOWN):
        monkeypatch.setitem(table, gpu.name, gpu)
    return gpu


@pytest.fixture
def no_search(monkeypatch):
    """What would fit is not searched for: it takes seconds."""
    monkeypatch.setattr(Remedies, "changes", lambda remedies: [])
    monkeypatch.setattr(Remedies, "largest_batch", lambda remedies: None)


def test_the_command_runs_by_itself_without_network_or_gpu(folder):
    """As a reader types it, in a process whose hub and proxies lead nowhere."""
    alone = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HTTPS_PROXY": "http://127.0.0.1:9"}
    options = "--gpu T4 --batch 8 --length 64".split()
    done = python("-m", "tight_fit", "--model", folder, *options, env=os.environ | alone)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for words in (
        "LlamaForCausalLM", "activations", "optimizer states", "cuBLAS workspace", "CUDA context",
        "allocator", "margin", "YES, it fits on a T4", "PyTorch would report", "Largest batch",
    ):  # fmt: skip
        assert words in done.stdout


@pytest.mark.parametrize("gpu, fields", [
    ("T4", {}), ("H100", {"float8": "tensorwise"}), ("T4", {"task": "dpo"}),
], ids=["plain", "float8", "dpo"])  # fmt: skip
def test_json_holds_the_plan(folder, facts, gpu, fields):
    """Where it fits, no change is searched for."""
    options = " ".join(f"--{name} {value}" for name, value in fields.items())
    found = facts(f"--gpu {gpu} --batch 8 --length 64 {options}")
    planned = plan_model(folder, gpu=gpu, batch_size=8, length=64, **fields)
    fit, peaks = planned.fits(gpu), planned.allocator_peaks(gpu)
    expected = fields | {
        "fits": True, "peak": planned.peak, "at_peak": planned.at_peak, "terms": fit.terms,
        "allocated": peaks.allocated, "reserved": peaks.reserved, "would_fit": [],
        "need": fit.need, "peak_phase": planned.peak_phase,
        "seconds": planned.seconds(gpu).total,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_seconds_of_a_step_and_the_price_of_an_epoch(folder, no_search, facts, ask):
    """The figures of JSON from the plan's seconds, and the text with the same."""
    options = "--gpu T4 --batch 8 --length 64 --precision fp16 --examples 1001 --price 0.35"
    found = facts(options)
    took = plan_model(folder, batch_size=8, length=64, precision="fp16", flash=False).seconds("T4")
    assert found["seconds"] == took.total and found["seconds_by_phase"] == took.phases
    assert found["seconds_low"] < found["seconds"] < found["seconds_high"]
    assert found["examples_per_second"] == pytest.approx(8 / took.total)
    assert found["tokens_per_second"] == pytest.approx(8 * 64 / took.total)
    every = sum(found["flops"].values()) / took.total / 65e12  # also of what causal attention masks
    assert 0.8 * every < found["mfu"] == took.mfu("fp16") <= every
    assert found["epoch_hours"] == pytest.approx(126 * took.total / 3600)  # the last step is short
    assert found["epoch_cost"] == pytest.approx(0.35 * found["epoch_hours"])
    text = ask(options)[1]
    for words in ("A step takes", "examples per second", "tokens per second, MFU", "per hour"):
        assert words in text
    assert "An epoch of 1,001 examples takes" in text and "No kernels" not in text


def test_a_gpu_without_the_arithmetic_has_no_time(no_search, ask, refuses):
    """Memory is planned all the same; an epoch of such steps is refused."""
    options = "--gpu T4 --batch 2 --length 16 --precision bf16"
    for more in ("", " --json"):
        code, text = ask(options + more)
        assert code == 0 and "The T4 has no bf16 arithmetic: use fp32 or fp16." in text
    refuses(f"{options} --examples 10", "The T4 has no bf16 arithmetic")


def test_compile_plans_each_layer_compiled(no_search, facts):
    options = "--gpu T4 --batch 8 --length 64"
    before, after = facts(options), facts(f"{options} --compile")
    assert after["compile"] and "compile" not in before
    assert after["peak"] < before["peak"] and after["seconds"] < before["seconds"]
    assert any("each layer compiled by itself" in note for note in after["notes"])
    assert any("--compile plans" in note for note in before["notes"])


def test_a_gpu_whose_kernels_nobody_measured_says_so(no_search, ask):
    code, text = ask("--gpu H100 --batch 2 --length 16")
    assert code == 0 and "No kernels of the H100 were measured: those of the A100-40GB" in text
    assert "It is planned for its limit of 700 W" in text


def test_what_does_not_fit_says_what_would(folder, small, ask):
    """Every option that the text offers, typed as it is, gives a step that fits; half as many
    micro-batches do not."""
    code, text = ask("--gpu Small --batch 32 --length 128")
    assert code == 1 and "NO, it does not fit" in text
    lines = text.split("What would fit, each change alone:\n")[1].split("Largest batch")[0]
    lines = [line for line in lines.splitlines() if not line.startswith("YES with")]
    offered = [line.split("   (needs")[0].split() for line in lines]
    for words in offered:
        typed = [str(folder), "--batch", "32", "--length", "128", *words]
        step = step_of(question.of(parser().parse_args(typed)))
        assert plan_model_step(step).fits(small), words
    parts = [int(words[1]) for words in offered if words[0] == "--accumulation"]
    assert parts
    assert not plan_model(folder, batch_size=32, length=128, accumulation=parts[0] // 2).fits(small)


@pytest.mark.parametrize("examples, parts", [(4, 1), (300, 2)])
def test_the_largest_batch_fits_and_one_more_does_not(folder, of_folder, small, examples, parts):
    fields = {"length": 64, "accumulation": parts}
    most = Remedies(of_folder(batch_size=examples * parts, **fields), small).largest_batch()
    assert plan_model(folder, batch_size=most, **fields).fits(small)
    assert not plan_model(folder, batch_size=most + parts, **fields).fits(small)


@given(
    first=st.integers(1, 3000),
    row=st.integers(0, 50),
    every=st.integers(1, 300),
    jump=st.integers(1, 5000),
    room=st.integers(0, 10**6),
)
def test_the_search_needs_few_plans_where_bytes_jump(first, row, every, jump, room):
    """A staircase, like the allocator's segments: of thousands of sizes few are planned."""

    def over(number):
        looks.append(number)
        return row * number + jump * (number // every) - room

    looks: list[int] = []
    most = largest_that_fits(over, first)
    assert len(looks) <= 60
    assert most == LIMIT - 1 or (over(most) if most else 0) <= 0 < over(most + 1)


@given(first=st.integers(1, 3000), slope=st.floats(1, 100), limit=st.integers(0, 5000))
def test_a_line_is_searched_in_a_few_looks(first, slope, limit):
    def over(number):
        looks.append(number)
        return slope * (number - limit - 0.5)

    looks: list[int] = []
    assert largest_that_fits(over, first) == limit
    assert len(looks) <= 14 and (len(looks) <= 2 or first != limit)


def test_a_hopeless_case_ends_plainly(ask, monkeypatch):
    monkeypatch.setitem(gpus.KNOWN, "None", gpus.GPU("None", gpus.CONTEXT, (7, 5)))
    code, text = ask("--gpu None --batch 2 --length 16")
    assert code == 1 and "No technique planned here" in text and "not even one example" in text
    assert "or plan several with --gpus N." in text
    assert "Not planned, and may help: offloading weights to main memory." in text


@pytest.mark.night
def test_lora_beside_eight_billion_parameters_on_24_gb(ask):
    """A true yes: the command that it prints, typed as it is, fits."""
    code, text = ask("--gpu RTX4090 --lora 16 --batch 2 --length 2048", "llama-3.1-8b")
    assert code == 1 and "frozen; fp32 adapters of rank 16" in text
    (line,) = [line for line in text.splitlines() if line.startswith("YES with")]
    model, *typed = shlex.split(line.partition(": tight-fit ")[2])
    options = " ".join(typed).replace("RTX 4090", "RTX4090")
    code, text = ask(f"{options} --quick", model)
    assert code == 0 and "YES, it fits on an RTX 4090" in text


def test_without_a_gpu_the_gpus_that_hold_it(ask):
    code, text = ask("--batch 2 --length 16")
    assert code == 0 and "GPUs that hold it: GTX 1650" in text
    for option in ("--list-gpus", "--list-cards"):
        code, text = ask(option, None)
        assert code == 0 and all(name in text for name in gpus.KNOWN)


def test_every_option_of_the_step_is_a_field_of_it(folder, of_folder):
    """Also under its older name, `--card`."""
    typed = f"--model {folder} --card T4 --batch 6 --length 9 --precision fp16 --optimizer sgd"
    typed += " --frozen 1 --checkpointing --accumulation 3 --lora-rank 2 --task causal-lm"
    typed += " --weights bf16 --targets o_proj --lora-alpha 4 --rslora --base nf4"
    typed += " --attention eager --chunked-loss --offload optimizer"
    options = parser().parse_args(typed.split())
    classes = parser().parse_args([str(folder), "--classes", "5"])
    assert options.gpu == "T4" and question.of(classes).fields == {"classes": 5}
    assert step_of(question.of(options)) == of_folder(
        batch_size=6, length=9, precision="fp16", optimizer="sgd", frozen=1, checkpointing=True,
        accumulation=3, lora_rank=2, task="causal-lm", weights="bf16", lora_targets="o_proj",
        lora_alpha=4, lora_scale="alpha/sqrt(r)", base="nf4", attention="eager", loss="chunked",
        offload="optimizer",
    )  # fmt: skip
    typed = [str(folder), "--task", "grpo", "--completion", "9", "--reference", "model"]
    step = step_of(question.of(parser().parse_args(typed)))
    assert (step.task, step.completion, step.reference) == ("grpo", 9, "model")
    vit = str(ROOT / "helpers" / "mini" / "vit")
    options = parser().parse_args([vit, "--model", vit, "--image-size", "32"])
    assert step_of(question.of(options)).side == 32


NOTHING_TO_PLAN = [
    ("--help", 0),
    ("--list-gpus", 0),
    ("gpt2 --list-gpus", 2),
    ("gpt2 --gpu T9000", 2),
    ("rebarta-base --gpu T4", 2),
    ("gpt2 --batch many", 2),
    ("{folder} --gpu T4 --batch 0", 2),
    ("{folder} --gpu T4 --length 5000", 2),
    ("roberta-base --gpu 8GB", 0),  # an answer that comes with the package
]


def test_what_needs_no_plan_is_answered_without_pytorch(folder):
    typed = [(words.format(folder=folder), expected) for words, expected in NOTHING_TO_PLAN]
    code = f"""
import sys
from tight_fit.command.main import main
for typed, expected in {typed}:
    try: status = main(typed.split())
    except SystemExit as ended: status = ended.code
    there = {{"torch", "transformers", "numpy"}} & set(sys.modules)
    assert (status, there) == (expected, set()), (typed, status, there)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_without_pytorch_a_new_plan_says_what_to_install():
    code = "import sys\nsys.modules['torch'] = None\nfrom tight_fit.command.main import main\n"
    done = python("-c", code + "main(['gpt2', '--length', '77', '--fresh'])")
    assert done.returncode == 2 and "a new plan needs torch: pip install -r" in done.stderr
