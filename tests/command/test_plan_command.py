"""`python -m tight_fit`: what it prints, what it answers, how it ends."""

import json
import os
import shlex
from pathlib import Path

import pytest
import transformers as library
from hypothesis import given
from hypothesis import strategies as st

from tests.small import python
from tight_fit import gpus
from tight_fit.command import question
from tight_fit.command.answer import step_of
from tight_fit.command.main import main
from tight_fit.command.options import parser
from tight_fit.plans.model import ModelStep, plan_model, plan_model_step
from tight_fit.search.largest import LIMIT, largest_that_fits
from tight_fit.search.remedies import Remedies

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Answers are kept for one test only."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def small(monkeypatch):
    """A GPU so small that a toy does not fit it with room for CUDA's context."""
    gpu = gpus.GPU("Small", gpus.CONTEXT + 2 * int(8.125 * 2**20) + 20 * 2**20, (7, 5))
    for table in (gpus.GPUS, gpus.KNOWN):
        monkeypatch.setitem(table, gpu.name, gpu)
    return gpu


def asked(capsys, *arguments) -> tuple[int, str]:
    code = main([str(part) for part in arguments])
    return code, capsys.readouterr().out


def test_the_command_runs_by_itself_without_network_or_gpu(folder):
    """As a reader types it, in a process whose hub and proxies lead nowhere."""
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HTTPS_PROXY": "http://127.0.0.1:9",
    }
    done = python(
        "-m", "tight_fit", "--model", folder, "--gpu", "T4", "--batch", "8", "--length", "64",
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for words in (
        "LlamaForCausalLM",
        "activations",
        "optimizer states",
        "cuBLAS workspace",
        "CUDA context",
        "allocator",
        "margin",
        "YES, it fits on a T4",
        "PyTorch would report",
        "Largest batch",
    ):
        assert words in done.stdout


def test_json_holds_the_plan(folder, capsys):
    code, text = asked(
        capsys, "--model", folder, "--gpu", "T4", "--batch", 8, "--length", 64, "--json"
    )
    facts, planned = json.loads(text), plan_model(folder, batch_size=8, length=64, flash=False)
    fit = planned.fits("T4")
    assert code == 0 and facts["fits"] is True
    assert facts["peak"] == planned.peak and facts["at_peak"] == planned.at_peak
    assert (facts["allocated"], facts["reserved"]) == (
        planned.allocator_peaks("T4").allocated,
        planned.allocator_peaks("T4").reserved,
    )
    assert facts["terms"] == fit.terms
    assert facts["would_fit"] == []
    assert facts["need"] == fit.need
    assert facts["peak_phase"] == planned.peak_phase


@pytest.fixture
def no_search(monkeypatch):
    """What would fit is not searched for: it takes seconds."""
    monkeypatch.setattr(Remedies, "changes", lambda remedies: [])
    monkeypatch.setattr(Remedies, "largest_batch", lambda remedies: None)


def test_seconds_of_a_step_and_the_price_of_an_epoch(folder, no_search, capsys):
    """The figures of JSON from the plan's seconds, and the text with the same."""
    step = ("--model", folder, "--gpu", "T4", "--batch", 8, "--length", 64, "--precision", "fp16")
    epoch = ("--examples", 1001, "--price", "0.35")
    facts = json.loads(asked(capsys, *step, *epoch, "--json")[1])
    took = plan_model(folder, batch_size=8, length=64, precision="fp16", flash=False).seconds("T4")
    assert facts["seconds"] == took.total and facts["seconds_by_phase"] == took.phases
    assert facts["seconds_low"] < facts["seconds"] < facts["seconds_high"]
    assert facts["examples_per_second"] == pytest.approx(8 / took.total)
    assert facts["tokens_per_second"] == pytest.approx(8 * 64 / took.total)
    every = sum(facts["flops"].values()) / took.total / 65e12  # also of what causal attention masks
    assert 0.8 * every < facts["mfu"] == took.mfu("fp16") <= every
    assert facts["epoch_hours"] == pytest.approx(126 * took.total / 3600)  # the last step is short
    assert facts["epoch_cost"] == pytest.approx(0.35 * facts["epoch_hours"])
    text = asked(capsys, *step, *epoch)[1]
    for words in ("A step takes", "examples per second", "tokens per second, MFU", "per hour"):
        assert words in text
    assert "An epoch of 1,001 examples takes" in text and "No kernels" not in text


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_a_gpu_without_the_arithmetic_has_no_time(folder, no_search, capsys, extra):
    """Memory is planned all the same; an epoch of such steps is refused."""
    step = ("--model", folder, "--gpu", "T4", "--batch", 2, "--length", 16, "--precision", "bf16")
    code, text = asked(capsys, *step, *extra)
    assert code == 0 and "The T4 has no bf16 arithmetic: use fp32 or fp16." in text
    with pytest.raises(SystemExit) as ended:
        asked(capsys, *step, "--examples", 10)
    assert ended.value.code == 2
    assert "The T4 has no bf16 arithmetic" in capsys.readouterr().err.splitlines()[-1]


def test_compile_plans_each_layer_compiled(folder, no_search, capsys):
    step = ("--model", folder, "--gpu", "T4", "--batch", 8, "--length", 64, "--json")
    (code, plain), (also, compiled) = asked(capsys, *step), asked(capsys, *step, "--compile")
    assert code == also == 0
    before, after = json.loads(plain), json.loads(compiled)
    assert after["compile"] and "compile" not in before
    assert after["peak"] < before["peak"] and after["seconds"] < before["seconds"]
    assert any("each layer compiled by itself" in note for note in after["notes"])
    assert any("--compile plans" in note for note in before["notes"])


def test_a_gpu_whose_kernels_nobody_measured_says_so(folder, no_search, capsys):
    code, text = asked(capsys, "--model", folder, "--gpu", "H100", "--batch", 2, "--length", 16)
    assert code == 0 and "No kernels of the H100 were measured: those of the A100-40GB" in text
    assert "It is planned for its limit of 700 W" in text


def test_what_does_not_fit_says_what_would(folder, small, capsys):
    """Every option that the text offers, typed as it is, gives a step that fits; half as many
    micro-batches do not."""
    code, text = asked(capsys, "--model", folder, "--gpu", "Small", "--batch", 32, "--length", 128)
    assert code == 1 and "NO, it does not fit" in text
    offered = (
        text.split("What would fit, each change alone:\n")[1].split("Largest batch")[0].splitlines()
    )
    offered = [line.split("   (needs")[0] for line in offered if not line.startswith("YES with")]
    for line in offered:
        typed = ["--model", str(folder), "--batch", "32", "--length", "128", *line.split()]
        step = step_of(question.of(parser().parse_args(typed)))
        assert plan_model_step(step).fits(small), line
    parts = [int(option.split()[1]) for option in offered if "--accumulation" in option]
    assert parts
    assert not plan_model(folder, batch_size=32, length=128, accumulation=parts[0] // 2).fits(small)


@pytest.mark.parametrize("examples, parts", [(4, 1), (300, 2)])
def test_the_largest_batch_fits_and_one_more_does_not(folder, small, examples, parts):
    fields = {"length": 64, "accumulation": parts}
    most = Remedies(
        ModelStep(
            library.LlamaConfig.from_pretrained(folder), batch_size=examples * parts, **fields
        ),
        small,
    ).largest_batch()
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


def test_several_changes_together_where_none_suffices(folder, monkeypatch):
    gpu = gpus.GPU("Tiny", gpus.CONTEXT + 2 * int(8.125 * 2**20) + 8 * 2**20, (7, 5))
    remedies = Remedies(
        ModelStep(library.LlamaConfig.from_pretrained(folder), batch_size=32, length=128), gpu
    )
    (change,) = remedies.changes()
    plain = {"batch_size": 32, "length": 128, "flash": False}  # Llama's kernels on such a GPU
    assert len(change) > 1 and plan_model(folder, **plain, **change).fits(gpu)
    for name in change:
        fewer = {key: value for key, value in change.items() if key != name}
        assert not plan_model(folder, **plain, **fewer).fits(gpu)


def test_a_hopeless_case_ends_plainly(folder, capsys, monkeypatch):
    monkeypatch.setitem(gpus.KNOWN, "None", gpus.GPU("None", gpus.CONTEXT, (7, 5)))
    code, text = asked(capsys, "--model", folder, "--gpu", "None", "--batch", 2, "--length", 16)
    assert code == 1 and "No technique planned here" in text and "not even one example" in text
    assert "or plan several with --gpus N." in text
    assert "Not planned, and may help: offloading weights to main memory." in text


@pytest.mark.night
def test_lora_beside_eight_billion_parameters_on_24_gb(capsys):
    """A true yes: the command that it prints, typed as it is, fits."""
    question_asked = ["llama-3.1-8b", "--gpu", "RTX 4090", "--lora", "16", "--batch", "2"]
    code, text = asked(capsys, *question_asked, "--length", 2048)
    assert code == 1 and "frozen; fp32 adapters of rank 16" in text
    (line,) = [line for line in text.splitlines() if line.startswith("YES with")]
    typed = shlex.split(line.partition(": tight-fit ")[2])
    code, text = asked(capsys, *typed, "--quick")
    assert code == 0 and "YES, it fits on an RTX 4090" in text


def test_without_a_gpu_the_gpus_that_hold_it(folder, capsys):
    code, text = asked(capsys, "--model", folder, "--batch", 2, "--length", 16)
    assert code == 0 and "GPUs that hold it: GTX 1650" in text
    for option in ("--list-gpus", "--list-cards"):
        code, text = asked(capsys, option)
        assert code == 0 and all(name in text for name in gpus.KNOWN)


def test_every_option_of_the_step_is_a_field_of_it(folder):
    """Also under its older name, `--card`."""
    typed = f"--model {folder} --card T4 --batch 6 --length 9 --precision fp16 --optimizer sgd"
    typed += " --frozen 1 --checkpointing --accumulation 3 --lora-rank 2 --task causal-lm"
    typed += " --weights bf16 --targets o_proj --lora-alpha 4 --rslora --base nf4"
    typed += " --attention eager --chunked-loss --offload optimizer"
    options = parser().parse_args(typed.split())
    classes = parser().parse_args([str(folder), "--classes", "5"])
    assert options.gpu == "T4" and question.of(classes).fields == {"classes": 5}
    assert step_of(question.of(options)) == ModelStep(
        library.LlamaConfig.from_pretrained(folder),
        batch_size=6,
        length=9,
        precision="fp16",
        optimizer="sgd",
        frozen=1,
        checkpointing=True,
        accumulation=3,
        lora_rank=2,
        task="causal-lm",
        weights="bf16",
        lora_targets="o_proj",
        lora_alpha=4,
        lora_scale="alpha/sqrt(r)",
        base="nf4",
        attention="eager",
        loss="chunked",
        offload="optimizer",
    )
    vit = str(ROOT / "helpers" / "mini" / "vit")
    options = parser().parse_args([vit, "--model", vit, "--image-size", "32"])
    assert step_of(question.of(options)).side == 32


@pytest.mark.parametrize(
    "arguments, status",
    [
        ("--help", 0),
        ("--modle x", 2),
        ("--list-gpus", 0),
        ("gpt2 --list-gpus", 2),
        ("gpt2 --gpu T9000", 2),
        ("rebarta-base --gpu T4", 2),
        ("gpt2 --batch many", 2),
        ("roberta-base --gpu 8GB", 0),  # an answer that comes with the package
    ],
)
def test_what_needs_no_plan_is_answered_without_pytorch(arguments, status):
    code = f"""
import sys
from tight_fit.command.main import main
try:
    status = main({arguments.split()})
except SystemExit as ended:
    status = ended.code
print(status, sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == f"{status} []", done.stderr


def test_without_pytorch_a_new_plan_says_what_to_install():
    code = "import sys\nsys.modules['torch'] = None\nfrom tight_fit.command.main import main\n"
    done = python("-c", code + "main(['gpt2', '--length', '77', '--fresh'])")
    assert done.returncode == 2 and "a new plan needs torch: pip install -r" in done.stderr
