"""Options of the commands: any options with any values, given twice, near names, configurations."""

import json
import math
import os
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen3Config, T5Config, ViTConfig

from tests.attack import command_refuses, one_sentence, refused
from tests.attack.test_recipes import tried
from tests.attack.wrong import SHORT, WRONG
from tight_fit.command import main as command
from tight_fit.command import question
from tight_fit.command.arguments import did_you_mean
from tight_fit.command.options import parser
from tight_fit.models import names
from tight_fit.models.bounds import check_sizes
from tight_fit.models.config import from_values
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model
from tight_fit.techniques.references import TASKS as REFERENCED
from tools.calculator import make
from tools.course import ROOT, bundle
from tools.course import __main__ as course

GPT2 = ["gpt2", "--gpu", "T4"]
LAYOUT = [*GPT2, "--layout"]
MODELS = ("gpt2", "roberta-base", "google/vit-base-patch16-224", "gtp2", "", "/", "x" * 9999)


def refuses(arguments, capsys, *parts, main=command.main):
    return command_refuses(main, arguments, capsys, *parts)


# -- the property

ACTIONS = {
    next(name for name in action.option_strings if name.startswith("--")): action
    for action in parser()._actions
    if action.option_strings and action.dest not in ("help", "list_gpus", "compile")
}
NUMBERS = ("", "0", "-1", "1.5", "1e3", "1_0", "٣", "nan", "inf", "x", "9" * 5000, " 8", "0x10")
WORDS = st.sampled_from(
    (*NUMBERS, "1", "2", "8", "T4", "A100", "8GB", "fsdp=2", "NVLink 4")
) | st.text(max_size=9)


def typed(name):
    """One option as it may be typed, with a value of its own or with any."""
    action = ACTIONS[name]
    if action.nargs == 0:
        return st.just([name])
    right = st.sampled_from(sorted(action.choices)) if action.choices else st.just("4")
    return (right | WORDS).map(lambda value: [f"{name}={value}"])


LINES = st.lists(st.sampled_from(sorted(ACTIONS)), max_size=5, unique=True).flatmap(
    lambda names: st.tuples(*(typed(name) for name in names))
)


@settings(tried, max_examples=300)
@given(st.sampled_from(MODELS), LINES)
def test_any_options_ask_a_question_or_are_refused_in_one_sentence(model, options):
    """Of the questions that are asked no plan is made here: each names a step, or is refused."""
    asked, heard = [], []

    def answered(wanted, given):
        asked.append(wanted)
        return 0

    words = [model, *(word for option in options for word in option)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "argparse.ArgumentParser._print_message", lambda _, text, file: heard.append(text)
        )
        patch.setattr("tight_fit.command.options._answer", answered)
        try:
            command.command.main(words, "tight-fit", answered)
        except SystemExit as ended:
            assert ended.code == 2 and not asked
            one_sentence(re.sub(r" \([^()]* --help shows examples\.\)", "", heard[-1]))
            return
    (wanted,) = asked
    assert len(wanted.key) == 40 and wanted.values
    assert wanted.fields.keys() <= {*question.STEP, "max_grad_norm"}
    try:
        ModelStep(from_values(wanted.values, wanted.name), **wanted.fields)
    except WRONG as error:
        assert len(one_sentence(str(error))) < SHORT


# -- what the property does not draw often


@pytest.mark.parametrize(
    "more",
    ["--gpu A100", "--card A100", "--batch 8 --batch-size 16", "--lora 8 --lora-rank 16",
     "--layout fsdp=2 --layout fsdp=4", "--quick --quick"],
)  # fmt: skip
def test_an_option_given_twice(more, capsys):
    refuses([*GPT2, *more.split()], capsys, "give it once")


def test_what_is_near_an_option_or_its_choice_is_asked_back(capsys):
    for name, action in ACTIONS.items():
        doubled = name[:3] + name[2:]
        meant = did_you_mean(doubled, ACTIONS)
        assert name in meant
        refuses([*GPT2, doubled], capsys, meant)
        for choice in action.choices or ():
            refuses([*GPT2, name, f"{choice}x"], capsys, "Did you mean")


def test_numbers_of_options_are_whole_ones_in_bounds(capsys):
    counts = [n for n in ACTIONS if ACTIONS[n].metavar in ("N", "R")]
    assert len(counts) > 10
    for name in counts:
        for value in NUMBERS:
            if not (value == "0" and name in ("--prefetch", "--frozen")):
                refuses([*LAYOUT, "fsdp=2", f"{name}={value}"], capsys)
    for name in ("--price", "--lora-alpha"):
        for value in ("", "-1", "nan", "inf", "-inf", "x", "1e999"):
            refuses([*GPT2, "--examples", "9", "--lora", "8", f"{name}={value}"], capsys)


# What one step cannot be is in test_recipes.py (OF_ANY), as the command asks a step for it.
TYPED = {  # {what the sentence says: (what is typed, ...)}
    "--layout": [f"gpt2 --gpu T4 --{what}" for what in (
        "between=x", "cards=8", "recompute=full", "no-reshard", "wrap=layers", "prefetch=0",
        "reduce=bf16")],
    "one GPU only": ["gpt2 --gpu T4 --layout fsdp=2 --fastest",
                     "gpt2 --gpu T4 --layout fsdp=2 --examples 9"],
    "link=": ["gpt2 --gpu T4 --layout fsdp=2 --inside NVLink9",
              "gpt2 --gpu T4 --layout fsdp=2 --between=",
              "gpt2 --gpu T4 --gpus 4 --inside string"],
    "c_attn": ["gpt2 --gpu T4 --lora 8 --targets c_atn"],
    "does not divide": ["gpt2 --gpu T4 --gpus 4 --accumulation 3"],
    "no class of gpt2": ["gpt2 --gpu T4 --task image-classification"],
    "Did you mean causal-lm?": ["gpt2 --gpu T4 --task causal_lm"],
    "named twice": ["gpt2 --gpu T4 --model gpt2"],
    "--examples": ["gpt2 --gpu T4 --price 1"],
    "unrecognized": ["gpt2 --gpu T4 tp=2"],
    # models
    "or FacebookAI/roberta-base?": ["rebarta-base --gpu T4"],
    "neither a folder": ["x/y/z --gpu T4"],
    "is stored as GGUF": ["some/Llama-3.2-3B-GGUF --gpu T4"],
    "225": ["google/vit-base-patch16-224 --gpu T4 --image-size 225"],
    "none whose name is known": ["microsoft/resnet-50 --gpu T4 --lora 4"],
    "did you mean openai-community/gpt2": ["gtp2 --gpu T4"],
    "There is no file": ["/ --gpu T4"],
    "a model is needed": ["--model= --gpu T4"],
    "too long": ["x" * 9999 + " --gpu T4"],
    # GPUs
    "a size says nothing of a GPU's speed": ["gpt2 --gpu 8GB --fastest"],
    "time is not known for AMD": ["gpt2 --gpu MI300X --fastest"],
    "did you mean RTX 5060": ["gpt2 --gpu RTX9060"],
    "no size of a GPU": ["gpt2 --gpu 5000GB"],
    "name one with --gpu": ["gpt2 --examples 10"],
    "--gpu": ["gpt2 --layout fsdp=2"],
    # questions for the best layout
    "cannot be divided evenly over 3 machines": ["gpt2 --gpu T4 --gpus 8 --machines 3"],
    "is one of 2 GPUs, and --gpus is 4": ["gpt2 --gpu T4 --gpus 4 --layout fsdp=2"],
    "details of one layout": ["gpt2 --gpu T4 --gpus 4 --no-reshard",
                              "gpt2 --gpu T4 --gpus 4 --schedule gpipe"],
    "has no bf16": ["gpt2 --gpu T4 --gpus 4 --precision bf16"],
    "say with --gpus how many": ["gpt2 --machines 2"],
    "is planned on one GPU": [f"gpt2 --gpu T4 --task {task} {many}" for task in REFERENCED
                              for many in ("--layout fsdp=2", "--gpus 2")],
    "has no products in FP8": ["gpt2 --gpu T4 --float8 tensorwise", "gpt2 --gpu A100-80GB "
                               "--layout fsdp=2 --compile --float8 tensorwise"],
    "add compile": ["gpt2 --gpu H100 --layout fsdp=2 --float8 tensorwise"],
    "--schedule is about several GPUs": ["gpt2 --schedule gpipe"],
}  # fmt: skip
LAYOUTS = {  # of gpt2 on T4
    "multiple of 3": ["fsdp=3"],
    "multiple of 4": ["fsdp=2,cp=2 --length 511"],
    "multiply to the number": ["fsdp=2 --gpus 4"],
    "--schedule is that of a pipeline": ["fsdp=2 --schedule gpipe"],
    "not planned with context": ["fsdp=2,cp=2 --attention eager"],
    "give one": ["fsdp=2 --checkpointing --recompute selective"],
    "divided evenly": ["fsdp=4 --machines 3"],
    "Llama's layers": ["tp=2"],
    "leave them out with 'ddp'": [f"ddp=2 --{what}" for what in (
        "prefetch 1", "no-reshard", "wrap layers+embeddings")],
    "leave it out with ddp": ["ddp=2 --reduce bf16"],
    "planned for one GPU": [
        "ddp=2 --offload optimizer", "fsdp=2 --offload optimizer", "fsdp=2 --offload activations",
        "fsdp=2 --optimizer-in-backward --precision fp32"],
    "does not work on parts": [f"fsdp=2 --optimizer {name}" for name in (
        "adamw8bit", "paged_adamw8bit", "adafactor", "lion", "sgd")],
}  # fmt: skip
TYPED |= {says: [f"gpt2 --gpu T4 --layout {more}" for more in mores]
          for says, mores in LAYOUTS.items()}  # fmt: skip


@pytest.mark.parametrize(
    "typed, says", [(typed, says) for says, lines in TYPED.items() for typed in lines],
    ids=lambda value: value[-40:],
)  # fmt: skip
def test_options_that_contradict_each_other(typed, says, capsys):
    refuses(typed.split(), capsys, says)


# -- configurations: one field of a model's own is anything

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 128}  # fmt: skip
KINDS = {
    BertConfig: SIZES, LlamaConfig: SIZES, Qwen3Config: SIZES | {"head_dim": 32},
    GPT2Config: {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 128},
    T5Config: {"vocab_size": 100, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2,
               "num_heads": 4},
    ViTConfig: {name: SIZES[name] for name in list(SIZES)[:4]} | {
        "image_size": 32, "patch_size": 16},
}  # fmt: skip
FIELDS = sorted({name for values in KINDS.values() for name in values} | {
    "model_type", "dtype", "num_labels", "architectures", "hidden_act", "head_dim"})  # fmt: skip
JSON = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5)
    | st.lists(st.integers(0, 3), max_size=2) | st.just({}) | st.sampled_from(
        (0, -1, 10**9, 10**12, 10**30, "x" * 2000, "64", "float64", "float8_e4m3fn"))
)  # fmt: skip


def saved(folder, kind, **changed):
    """A folder with a configuration of this kind, some of its fields changed."""
    (folder / "config.json").write_text(json.dumps(kind(**KINDS[kind]).to_dict() | changed))
    return folder


# Each had an exception of a library, without the name of the field, or no end.
@example(BertConfig, "num_labels", 10**12)
@example(BertConfig, "type_vocab_size", -1)
@example(BertConfig, "hidden_dropout_prob", -1)
@example(BertConfig, "max_position_embeddings", 10**400)
@example(LlamaConfig, "attention_dropout", None)
@example(T5Config, "num_decoder_layers", 0)
@example(T5Config, "relative_attention_num_buckets", 10**12)
@example(ViTConfig, "patch_size", [])
@example(ViTConfig, "image_size", [224, 10**9])
@example(GPT2Config, "model_type", "x" * 2000)
@example(GPT2Config, "n_positions", math.nan)
@example(GPT2Config, "id2label", 3)
@settings(tried, max_examples=30)
@given(st.sampled_from(list(KINDS)), st.sampled_from(FIELDS), JSON)
def test_a_configuration_is_planned_or_refused_in_one_sentence(
    tmp_path_factory, kind, field, value
):
    folder = saved(tmp_path_factory.mktemp("model"), kind, **{field: value})
    length = {} if kind is ViTConfig else {"length": 32}
    try:
        planned = plan_model(folder, batch_size=1, **length)
    except (*WRONG, OSError) as error:
        one_sentence(str(error))
    else:
        assert planned.peak > 0


@pytest.mark.parametrize(
    "kind, field, value",
    [
        (BertConfig, "hidden_act", "x"),  # was "KeyError 'x'."
        (BertConfig, "dtype", []),  # was "list index out of range."
        (LlamaConfig, "num_attention_heads", 0),  # was "integer modulo by zero."
        (T5Config, "relative_attention_max_distance", -1),  # was "math domain error."
        (Qwen3Config, "head_dim", 0),
        (BertConfig, "num_hidden_layers", 10**9),
    ],
)
def test_the_field_at_fault_is_named(kind, field, value, tmp_path):
    refused(
        ValueError, field, lambda: plan_model(saved(tmp_path, kind, **{field: value}), length=9)
    )


def test_sizes_have_bounds_and_positions_may_have_none():
    def changed(config, name, value):
        object.__setattr__(config, name, value)  # as a file may hold it
        return config

    for name in KINDS[Qwen3Config]:
        for value in (0, -2, 10**12, 10**400, 10**5000, "64", True):
            wrong = changed(Qwen3Config(**KINDS[Qwen3Config]), name, value)
            refused(ValueError, f"{name} of the configuration", lambda c=wrong: check_sizes(c))
    for size in (0, -1, 10**9, [224, 10**9], (0, 224)):
        wrong = changed(ViTConfig(), "image_size", size)
        refused(ValueError, "from 1 to 20,000", lambda c=wrong: check_sizes(c))
    wrong = changed(BertConfig(), "id2label", range(10**9))
    refused(ValueError, "from 1 to 1,000,000", lambda: check_sizes(wrong))
    check_sizes(changed(BertConfig(), "max_position_embeddings", -1))


@pytest.mark.parametrize(
    "dtype", ["float64", "float8_e4m3fn", "int8", 0, 1.5, {}, "x" * 999], ids=str
)
def test_a_dtype_in_which_no_weights_are_planned(dtype):
    wrong = Qwen3Config(**KINDS[Qwen3Config])
    object.__setattr__(wrong, "dtype", dtype)
    refused(ValueError, "name fp32, bf16 or fp16", lambda: ModelStep(wrong))
    assert ModelStep(wrong, weights="bf16").weights == "bf16"


def test_a_file_that_is_no_configuration_is_not_asked_of_the_hub(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("00.ipynb", "model.safetensors", "config.txt", "x"):
        (tmp_path / "mine" / name).write_text("{}")
        refuses([f"mine/{name}", "--gpu", "T4"], capsys, "is a file, and no config.json")


def test_what_is_no_ordinary_file_or_too_large_is_not_read(tmp_path):
    """Neither waited for, nor read to an end that it does not have."""
    file = tmp_path / "config.json"
    os.mkfifo(file)
    refused(ValueError, "ordinary file", lambda: names.values_of(tmp_path))
    file.unlink()
    file.symlink_to("/dev/zero")
    refused(ValueError, "ordinary file", lambda: names.values_of(tmp_path))
    file.unlink()
    lists = ",".join(["[]"] * (names.LARGEST // 3 + 1))
    file.write_text(f'{{"model_type": "bert", "x": [{lists}]}}')
    refused(ValueError, "at most 4,194,304", lambda: names.values_of(tmp_path))


# -- other commands


OF_COURSE = [
    ("record --minutes 5 --minutes 9", "give it once"), ("record --minutes 0", "from 1 to 10,000"),
    ("record --minute 5", "unrecognized"), ("record --dry-run --out=", "is empty"),
    ("record --dry-run --out README.md/x", "is a file"), ("recrod", "Did you mean record?"),
    ("soak --only ofline", "Did you mean offline?"), ("soak --only nothing", "invalid choice"),
    ("soak --rounds 3", "unrecognized"), ("assign 02", "--out"), ("assign --out x", "NN"),
    ("grade a --seconds 1 --seconds 9", "give it once"),
    ("grade gone.ipynb --csv no/such/folder/a.csv", "there is no folder"),
    ("grade gone.ipynb --csv=", "is empty"), ("grade gone.ipynb --csv .", "is a folder"),
    ("grade gone.ipynb --seconds 0", "from 1 to 86,400"),
    ("grade gone.ipynb --memory 1e9", "from 1 to 4,096"), ("grade", "FILE"), ("keep", "DIR"),
    ("", "required"),
]  # fmt: skip


@pytest.mark.parametrize("typed, says", OF_COURSE)
def test_arguments_of_the_course_are_refused_before_work(typed, says, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    refuses(typed.split(), capsys, says, main=course.main)


def test_the_calculator_is_made_of_its_models(monkeypatch):
    monkeypatch.setattr(make, "write_file", None)
    monkeypatch.setattr(make, "planned", None)
    for name, says in {
        "openai-community/GPT2": "Did you mean openai-community/gpt2?",
        "google-t5/t5-small": "none of the models of the calculator",  # known, and not listed
        "nosuch": "'nosuch'",
        "": "''",
        "x" * 9999: "none of the models",
    }.items():
        given = ["openai-community/gpt2", name]
        refused(ValueError, says, lambda given=given: make.make(given))


@settings(tried, max_examples=60)
@given(st.integers(0, 2**30), st.sampled_from(["cut", "{}", "no plans", "a list", "zeros"]))
def test_a_damaged_file_of_the_calculator_is_named(tmp_path_factory, place, kind):
    whole = make.FILE.read_bytes()
    damaged = {
        "cut": whole[: place % len(whole)], "{}": b"{}", "zeros": bytes(99),
        "no plans": make.lzma.compress(b"{}"), "a list": make.lzma.compress(b"[]"),
    }[kind]  # fmt: skip
    file = tmp_path_factory.mktemp("damaged") / "plans.json.xz"
    file.write_bytes(damaged)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(make, "FILE", file)
        refused(ValueError, str(file), make.kept_models)
    assert file.read_bytes() == damaged


def test_arguments_of_the_bundle(capsys, monkeypatch):
    monkeypatch.setattr(bundle, "bundle", None)
    for typed in ("--larg", "--large --large", "--out=", "--out .", "--out no/x.zip"):
        monkeypatch.setattr("sys.argv", ["bundle", *typed.split()])
        refuses([], capsys, main=lambda _: bundle.main())
