"""Options of the commands: any options with any values, given twice, near names, configurations."""

import json
import math
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
from tight_fit.models.bounds import check_sizes
from tight_fit.models.config import from_values
from tight_fit.models.step import ModelStep
from tight_fit.plans.model import plan_model
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
    asked = []

    def layouts(wanted, given):
        asked.append(wanted)
        return 0

    def answered(wanted, given):
        return layouts(wanted, given)

    words = [model, *(word for option in options for word in option)]
    with pytest.MonkeyPatch.context() as patch:
        heard = []
        patch.setattr(
            "argparse.ArgumentParser._print_message", lambda _, text, file: heard.append(text)
        )
        patch.setattr("tight_fit.command.options._answer", answered)
        try:
            command.command.main(words, "tight-fit", layouts)
        except SystemExit as ended:
            assert ended.code == 2 and not asked
            one_sentence(re.sub(r" \([^()]* --help shows examples\.\)", "", heard[-1]))
            return
    (wanted,) = asked
    assert len(wanted.key) == 40
    assert wanted.values
    assert wanted.fields.keys() <= {*question.STEP, "max_grad_norm"}
    try:
        ModelStep(from_values(wanted.values, wanted.name), **wanted.fields)
    except WRONG as error:
        assert len(one_sentence(str(error))) < SHORT


# -- what the property does not draw often

TWICE = [
    ["--gpu", "A100"], ["--card", "A100"], ["--batch", "8", "--batch-size", "16"],
    ["--lora", "8", "--lora-rank", "16"], ["--optimizer", "sgd", "--optimizer", "sgd"],
    ["--layout", "fsdp=2", "--layout", "fsdp=4"], ["--quick", "--quick"],
]  # fmt: skip


@pytest.mark.parametrize("more", TWICE, ids=" ".join)
def test_an_option_given_twice(more, capsys):
    refuses([*GPT2, *more], capsys, "give it once")


@pytest.mark.parametrize("name", ACTIONS)
def test_what_is_near_an_option_or_its_choice_is_asked_back(name, capsys):
    doubled = name[:3] + name[2:]
    meant = did_you_mean(doubled, ACTIONS)
    assert name in meant
    refuses([*GPT2, doubled], capsys, meant)
    for choice in ACTIONS[name].choices or ():
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
CONTRADICT = [
    *((["--" + what], "--layout") for what in (
        "inside=NVLink 4", "between=x", "cards=8", "recompute=full", "no-reshard", "wrap=layers",
        "prefetch=0", "reduce=bf16")),
    (["--layout", "fsdp=2", "--fastest"], "one GPU only"),
    (["--layout", "fsdp=2", "--examples", "9"], "one GPU only"),
    (["--layout", "\t"], "--layout"),
    (["--layout", "fsdp=2", "--inside", "NVLink 9"], "link="),
    (["--layout", "fsdp=2", "--between", ""], "link="),
    (["--chunked-loss", "--task", "sequence-classification"], "loss='full'"),
    (["--lora", "8", "--targets", "c_atn"], "c_attn"),
    (["--accumulation", "3", "--batch", "8"], "does not divide"),
    (["--task", "image-classification"], "no class of gpt2"),
    (["--task", "causal_lm"], "Did you mean causal-lm?"),
    (["--model", "gpt2"], "named twice"),
    (["--price", "1"], "--examples"),
    (["tp=2"], "unrecognized"),
]  # fmt: skip
OF_MODELS = [
    ("rebarta-base", [], "or FacebookAI/roberta-base?"),
    ("x/y/z", [], "neither a folder"),
    ("some/Llama-3.2-3B-GGUF", [], "is stored as GGUF"),
    ("roberta-base", ["--chunked-loss"], "next token"),
    ("microsoft/deberta-v3-base", ["--attention", "sdpa"], "'eager' alone"),
    ("google/vit-base-patch16-224", ["--length", "128"], "for text"),
    ("google/vit-base-patch16-224", ["--image-size", "225"], "224"),
    ("microsoft/resnet-50", ["--lora", "4"], "none whose name is known"),
    ("gtp2", [], "did you mean openai-community/gpt2"),
    ("/", [], "There is no file"),
    ("", [], "a model is needed"),
    ("x" * 9999, [], "too long"),
]
OF_GPUS = [
    (["--gpu", "8GB", "--fastest"], "a size says nothing of a GPU's speed"),
    (["--gpu", "MI300X", "--fastest"], "time is not known for AMD"),
    (["--gpu", "RTX 9060"], "did you mean RTX 5060"),
    (["--gpu", "5000GB"], "no size of a GPU"),
    (["--examples", "10"], "name one with --gpu"),
]
SEARCHED = [  # questions for the best layout
    (["--gpus", "8", "--machines", "3"], "cannot be divided evenly over 3 machines"),
    (["--gpus", "2", "--machines", "4"], "cannot be divided evenly over 4 machines"),
    (["--gpus", "4", "--layout", "fsdp=2"], "is one of 2 GPUs, and --gpus is 4"),
    (["--gpus", "4", "--no-reshard"], "details of one layout"),
    (["--gpus", "4", "--accumulation", "3"], "does not divide"),
    (["--gpus", "4", "--precision", "bf16"], "has no bf16"),
    (["--gpus", "4", "--inside", "string"], "link='string' is not known"),
    (["--gpus", "4", "--schedule", "gpipe"], "details of one layout"),
    (["--machines", "2"], "say with --gpus how many"),
    (["--schedule", "gpipe"], "--schedule is about several GPUs"),
]
NOT_DIVIDED = [
    (["fsdp=3"], "multiple of 3"),
    (["fsdp=2", "--accumulation", "16"], "multiple of 32"),
    (["hsdp=2x3"], "multiple of 6"),
    (["fsdp=2,cp=2", "--length", "511"], "multiple of 4"),
    (["fsdp=2", "--gpus", "4"], "multiply to the number"),
    (["fsdp=2", "--schedule", "gpipe"], "--schedule is that of a pipeline"),
    (["fsdp=2,cp=2", "--attention", "eager"], "not planned with context"),
    (["fsdp=2", "--checkpointing", "--recompute", "selective"], "give one"),
    (["fsdp=4", "--machines", "3"], "divided evenly"),
    (["tp=2"], "Llama's layers"),
    (["ddp=2", "--prefetch", "1"], "leave them out with 'ddp'"),
    (["ddp=2", "--no-reshard"], "leave them out with 'ddp'"),
    (["ddp=2", "--wrap", "layers+embeddings"], "leave them out with 'ddp'"),
    (["ddp=2", "--reduce", "bf16"], "leave it out with ddp"),
    *(([layout, "--offload", what], "planned for one GPU")
      for layout in ("ddp=2", "zero1=2", "zero2=2", "fsdp=2")
      for what in ("optimizer", "activations")),
    (["fsdp=2", "--optimizer-in-backward", "--precision", "fp32"], "planned for one GPU"),
    *((["fsdp=2", "--optimizer", name], "does not work on parts")
      for name in ("adamw8bit", "paged_adamw8bit", "adafactor", "lion", "sgd")),
]  # fmt: skip


@pytest.mark.parametrize(
    "arguments, says",
    [
        *(([*GPT2, *more], says) for more, says in CONTRADICT),
        *(([model, "--gpu", "T4", *more], says) for model, more, says in OF_MODELS),
        *(([*LAYOUT, *more], says) for more, says in NOT_DIVIDED),
        *((["gpt2", *more], says) for more, says in OF_GPUS),
        *(([*GPT2, *more], says) for more, says in SEARCHED),
        (["gpt2", "--layout", "fsdp=2"], "--gpu"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_options_that_contradict_each_other(arguments, says, capsys):
    refuses(arguments, capsys, says)


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


# Each had an exception of a library, without the name of the field, or no end.
@example(BertConfig, "hidden_act", "x")
@example(BertConfig, "dtype", [])
@example(BertConfig, "num_labels", 10**12)
@example(BertConfig, "type_vocab_size", -1)
@example(BertConfig, "hidden_dropout_prob", -1)
@example(BertConfig, "max_position_embeddings", 10**400)
@example(LlamaConfig, "num_attention_heads", 0)
@example(LlamaConfig, "attention_dropout", None)
@example(T5Config, "num_decoder_layers", 0)
@example(T5Config, "relative_attention_num_buckets", 10**12)
@example(T5Config, "relative_attention_max_distance", -1)
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
    folder = tmp_path_factory.mktemp("model")
    values = kind(**KINDS[kind]).to_dict() | {field: value}
    (folder / "config.json").write_text(json.dumps(values))
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
        (BertConfig, "vocab_size", 2**63),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named(kind, field, value, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(kind(**KINDS[kind]).to_dict() | {field: value})
    )
    refused(ValueError, field, lambda: plan_model(tmp_path, length=32))


def test_sizes_have_bounds_and_positions_may_have_none():
    def changed(config, name, value):
        object.__setattr__(config, name, value)  # as a file may hold it
        return config

    for kind in (BertConfig, Qwen3Config):
        for name in KINDS[kind]:
            for value in (0, -2, 10**12, 10**400, 10**5000, "64", True):
                wrong = changed(kind(**KINDS[kind]), name, value)
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


@pytest.mark.parametrize("name", ["00.ipynb", "model.safetensors", "config.txt", "x"])
def test_a_file_that_is_no_configuration_is_not_asked_of_the_hub(
    name, tmp_path, monkeypatch, capsys
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("{}")
    monkeypatch.chdir(tmp_path)
    refuses([f"mine/{name}", "--gpu", "T4"], capsys, "is a file, and no config.json")


# -- other commands


OF_COURSE = [
    ("record --minutes 5 --minutes 9", "give it once"), ("record --minutes 0", "from 1 to 10,000"),
    ("record --minute 5", "unrecognized"), ("record --dry-run --out=", "is empty"),
    ("record --dry-run --out README.md", "is a file"),
    ("record --dry-run --out README.md/x", "is a file"), ("recrod", "Did you mean record?"),
    ("soak --only ofline", "Did you mean offline?"), ("soak --only nothing", "invalid choice"),
    ("soak --rounds 3", "unrecognized"), ("soak --only=", "invalid choice"), ("assign 02", "--out"),
    ("assign --out x", "NN"),
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


@pytest.mark.parametrize(
    "names, says",
    [
        (["openai-community/GPT2"], "Did you mean openai-community/gpt2?"),
        (["google-t5/t5-small"], "none of the models of the calculator"),  # known, and not listed
        (["openai-community/gpt2", "nosuch"], "'nosuch'"),
        ([""], "''"),
        (["x" * 9999], "none of the models"),
    ],
    ids=lambda value: "".join(value)[:30],
)
def test_the_calculator_is_made_of_its_models(names, says, monkeypatch):
    monkeypatch.setattr(make, "write_file", None)
    monkeypatch.setattr(make, "planned", None)
    refused(ValueError, says, lambda: make.make(names))


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


@pytest.mark.parametrize(
    "arguments",
    [["--larg"], ["--large", "--large"], ["--out="], ["--out", "."], ["--out", "no/x.zip"]],
    ids=" ".join,
)
def test_arguments_of_the_bundle(arguments, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bundle", *arguments])
    monkeypatch.setattr(bundle, "bundle", None)
    refuses([], capsys, main=lambda _: bundle.main())
