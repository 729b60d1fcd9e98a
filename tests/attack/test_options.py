"""Options of the commands: given twice, contradicting each other, near names, wrong layouts."""

import re

import pytest

from tests.attack import one_sentence, refused
from tight_fit.command import main as command
from tight_fit.layouts.layout import Layout, parse
from tight_fit.layouts.plan import plan_layout
from tight_fit.models import config as hf_config
from tight_fit.models import names as model_names
from tools.calculator import make
from tools.course import __main__ as course
from tools.course import bundle

GPT2 = ["gpt2", "--gpu", "T4"]
LAYOUT = [*GPT2, "--layout"]


def refuses(arguments, capsys, *parts, main=command.main):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2 and not said.out
    return one_sentence(re.sub(r" \([^()]* --help shows examples\.\)", "", said.err), *parts)


TWICE = [
    ["--gpu", "A100"],
    ["--gpu=T4"],
    ["--card", "A100"],
    ["--batch", "8", "--batch", "16"],
    ["--batch", "8", "--batch-size", "16"],
    ["--length", "8", "--length=16"],
    ["--lora", "8", "--lora-rank", "16"],
    ["--precision", "bf16", "--precision", "fp16"],
    ["--optimizer", "sgd", "--optimizer", "sgd"],
    ["--base", "nf4", "--base", "bf16"],
    ["--weights", "bf16", "--weights", "fp32"],
    ["--offload", "optimizer", "--offload", "activations"],
    ["--layout", "fsdp=2", "--layout", "fsdp=4"],
    ["--price", "1", "--examples", "9", "--price", "2"],
    ["--quick", "--quick"],
]


@pytest.mark.parametrize("more", TWICE, ids=" ".join)
def test_an_option_given_twice(more, capsys):
    refuses([*GPT2, *more], capsys, "give it once")


NUMBERS = ("", "0", "-1", "1.5", "1e3", "1_0", "٣", "nan", "inf", "x", "9" * 5000, " 8", "0x10")
WHOLE = ("--batch", "--length", "--accumulation", "--lora", "--image-size", "--classes")
WHOLE += ("--examples", "--gpus", "--machines", "--cards")


@pytest.mark.parametrize("typed", NUMBERS, ids=lambda typed: typed[:9])
@pytest.mark.parametrize("option", WHOLE)
def test_a_number_is_a_whole_one_in_bounds(option, typed, capsys):
    refuses([*GPT2, f"{option}={typed}"], capsys)


@pytest.mark.parametrize("typed", ["", "-1", "nan", "inf", "-inf", "x", "1e999", "9" * 999])
def test_a_price_is_a_finite_number(typed, capsys):
    refuses([*GPT2, "--examples", "9", f"--price={typed}"], capsys, "number of at least 0")


@pytest.mark.parametrize("typed", ["", "0", "-1", "nan", "inf", "-inf", "x", "1e999"])
def test_a_scale_of_adapters_is_a_number(typed, capsys):
    refuses([*GPT2, "--lora", "8", f"--lora-alpha={typed}"], capsys)


OF_LAYOUTS = [
    ["--inside", "NVLink 4"],
    ["--between", "Ethernet 100 Gbit"],
    ["--cards", "8"],
    ["--recompute", "full"],
    ["--recompute", "selective"],
    ["--no-reshard"],
    ["--wrap", "layers"],
    ["--wrap", "layers+embeddings"],
    ["--prefetch", "0"],
    ["--prefetch", "2"],
    ["--reduce", "fp32"],
    ["--reduce", "bf16"],
    ["--cards", "1"],
    ["--prefetch", "7"],
]


@pytest.mark.parametrize("more", OF_LAYOUTS, ids=" ".join)
def test_what_says_something_of_a_layout_needs_one(more, capsys):
    refuses([*GPT2, *more], capsys, more[0], "--layout")


@pytest.mark.parametrize("more", [["--fastest"], ["--examples", "9"]], ids=" ".join)
def test_what_is_answered_for_one_gpu_has_no_layout(more, capsys):
    refuses([*LAYOUT, "fsdp=2", *more], capsys, more[0], "one GPU only")


@pytest.mark.parametrize("option", ["--gpu", "--layout"])
@pytest.mark.parametrize("typed", ["", " ", "\t"])
def test_an_empty_name_is_none(option, typed, capsys):
    refuses(
        ["gpt2", option, typed, *(["--gpu", "T4"] if option != "--gpu" else [])], capsys, option
    )


@pytest.mark.parametrize("option", ["--inside", "--between"])
@pytest.mark.parametrize("typed", ["", "NVLink 9", "x" * 999])
def test_a_link_has_a_known_name(option, typed, capsys):
    refuses([*LAYOUT, "fsdp=2", option, typed], capsys, "link=")


NEAR = [
    (["--qick"], "--quick"),
    (["--chunked-los"], "--chunked-loss"),
    (["--checkpoint"], "--checkpointing"),
    (["--bach=8"], "--batch"),
    (["--ofload", "optimizer"], "--offload"),
    (["--target", "all-linear"], "--targets"),
    (["--optimizer", "adamw8bits"], "adamw8bit"),
    (["--optimizer", "AdamW"], "adamw"),
    (["--precision", "BF16"], "bf16"),
    (["--attention", "SDPA"], "sdpa"),
    (["--base", "NF4"], "nf4"),
    (["--offload", "optimiser"], "optimizer"),
    (["--task", "causal_lm"], "causal-lm"),
    (["--recompute", "selectiv"], "selective"),
]


@pytest.mark.parametrize("more, meant", NEAR, ids=lambda value: " ".join(value))
def test_what_is_near_a_name_is_asked_back(more, meant, capsys):
    refuses([*GPT2, *more], capsys, f"Did you mean {meant}?")


CONTRADICT = [
    (["--targets", "all-linear"], "there are none"),
    (["--rslora"], "there are none"),
    (["--lora-alpha", "16"], "there are none"),
    (["--base", "nf4"], "lora_rank"),
    (["--base", "bf16", "--weights", "fp32"], "two dtypes"),
    (["--base", "fp32", "--weights", "bf16"], "two dtypes"),
    (["--weights", "fp16"], "cannot be trained"),
    (["--chunked-loss", "--task", "sequence-classification"], "loss='full'"),
    (["--optimizer-in-backward", "--accumulation", "4"], "accumulation=1"),
    (["--optimizer-in-backward", "--precision", "fp16"], "overflowed"),
    (["--offload", "optimizer", "--optimizer", "adamw8bit"], "made for a GPU"),
    (["--optimizer", "adamw_stochastic"], "base='bf16'"),
    (["--optimizer", "adamw_stochastic", "--weights", "bf16", "--lora", "8"], "without adapters"),
    (["--lora", "769"], "768 columns"),
    (["--lora", "8", "--frozen", "12"], "all layers are frozen"),
    (["--lora", "8", "--targets", "c_atn"], "c_attn"),
    (["--lora", "8", "--targets", ""], "names no layer"),
    (["--frozen", "13"], "12 layers"),
    (["--frozen", "-1"], "at least 0"),
    (["--length", "1025"], "1024 tokens"),
    (["--accumulation", "3", "--batch", "8"], "does not divide"),
    (["--classes", "3"], "classifier"),
    (["--image-size", "224"], "for images"),
    (["--task", "image-classification"], "no class of gpt2"),
    (["--model", "gpt2"], "named twice"),
    (["--price", "1"], "--examples"),
    (["gpt2"], "unrecognized"),
    (["tp=2"], "unrecognized"),
]


@pytest.mark.parametrize("more, says", CONTRADICT, ids=lambda value: "".join(value)[:40])
def test_options_that_contradict_each_other(more, says, capsys):
    refuses([*GPT2, *more], capsys, says)


@pytest.mark.parametrize(
    "model, more, says",
    [
        ("roberta-base", ["--chunked-loss"], "next token"),
        ("microsoft/deberta-v3-base", ["--attention", "sdpa"], "'eager' alone"),
        ("google/vit-base-patch16-224", ["--length", "128"], "for text"),
        ("google/vit-base-patch16-224", ["--image-size", "225"], "224"),
        ("google/vit-base-patch16-224", ["--chunked-loss"], "next token"),
        ("microsoft/resnet-50", ["--lora", "4"], "none whose name is known"),
        ("gtp2", [], "did you mean openai-community/gpt2"),
        ("robeta-base", [], "FacebookAI/roberta-base"),
        ("/", [], "There is no file"),
        ("", [], "a model is needed"),
        ("x" * 9999, [], "too long"),
    ],
    ids=lambda value: "".join(value)[:30],
)
def test_models_that_cannot_do_it(model, more, says, capsys):
    refuses([model, "--gpu", "T4", *more], capsys, says)


LAYOUTS = [
    *((text, "is not understood") for text in ("fsdp", "8", "=8", ",", "fsdp=8,", "fsdp=8,fsdp=2")),
    *((text, "is not understood") for text in ("ＦＳＤＰ=8", "megatron=2", "fsdp:8", "x" * 9999)),
    *((f"fsdp={number}", "no number of ranks") for number in ("", "0", "-2", "1.5", "x", "8 8")),
    *((f"fsdp={number}", "no number of ranks") for number in ("٨", "1e3", "9" * 5000, "+8", "0x8")),
    *((f"hsdp={pair}", "hsdp=2x4") for pair in ("8", "2x", "x4", "2x4x2", "2×4", "-2x4")),
    ("hsdp=0x4", "at least 1"),
    ("fspd=8", "did you mean fsdp"),
    ("tesnor=2", "did you mean tensor"),
    ("zero3=8", "did you mean zero"),
    ("fsdp=8,ddp=2", "choose one of them"),
    ("ddp=2,tp=2", "FSDP2 only"),
    ("pp=2,tp=2", "with data ranks only"),
    ("ep=2", "taken from the data ranks"),
    ("fsdp=999999", "100,000"),
]


@pytest.mark.parametrize("text, says", LAYOUTS, ids=lambda value: value[:20])
def test_a_layout_is_written_as_axes(text, says):
    refused(ValueError, says, lambda: parse(text))


@pytest.mark.parametrize("thing", [None, 3, 8.0, [], {}, b"fsdp=8", True], ids=repr)
def test_a_layout_is_a_text(thing):
    refused(TypeError, "layout", lambda: parse(thing))


NOT_DIVIDED = [
    (["fsdp=3"], "multiple of 3"),
    (["fsdp=2", "--accumulation", "16"], "multiple of 32"),
    (["fsdp=2", "--accumulation", "3"], "does not divide"),
    (["hsdp=2x3"], "multiple of 6"),
    (["fsdp=2,cp=2", "--length", "511"], "multiple of 4"),
    (["fsdp=2", "--gpus", "4"], "multiply to the number"),
    (["fsdp=4", "--machines", "3"], "divided evenly"),
    (["fsdp=4", "--machines", "8"], "divided evenly"),
    (["tp=2"], "Llama's layers"),
    (["ddp=2", "--prefetch", "1"], "leave them out with 'ddp'"),
    (["ddp=2", "--no-reshard"], "leave them out with 'ddp'"),
    (["ddp=2", "--wrap", "layers+embeddings"], "leave them out with 'ddp'"),
    (["ddp=2", "--reduce", "bf16"], "leave it out with ddp"),
    *(
        ([layout, "--offload", what], "planned for one GPU")
        for layout in ("ddp=2", "zero1=2", "zero2=2", "fsdp=2")
        for what in ("optimizer", "activations")
    ),
    (["fsdp=2", "--optimizer-in-backward", "--precision", "fp32"], "planned for one GPU"),
    (["ddp=2", "--optimizer-in-backward", "--precision", "fp32"], "planned for one GPU"),
    *(
        (["fsdp=2", "--optimizer", name], "does not work on parts")
        for name in ("adamw8bit", "paged_adamw8bit", "adafactor", "lion", "sgd")
    ),
]


@pytest.mark.parametrize("more, says", NOT_DIVIDED, ids=lambda value: "".join(value)[:40])
def test_a_step_that_the_layout_cannot_take(more, says, capsys):
    refuses([*LAYOUT, *more], capsys, says)


def test_a_layout_needs_a_gpu(capsys):
    refuses(["gpt2", "--layout", "fsdp=2"], capsys, "--gpu")


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": None},
        {"layout": "fsdp=two"},
        {"layout": 3},
        *({"reduce": value} for value in ("fp16", "", None, 3, "BF16")),
        *({"selective": value} for value in (1, "yes", None, "full")),
        *({"all_layers": value} for value in (1, "yes", None)),
        {"compile": 1},
        {"offload": "optimizer"},
        {"optimizer_in_backward": True, "max_grad_norm": None},
    ],
    ids=repr,
)
def test_a_planned_layout_has_known_settings(fields):
    config = hf_config.from_values(model_names.known()["openai-community/gpt2"], "gpt2")
    given = {"layout": Layout(data=2), **fields}
    refused((ValueError, TypeError), list(fields)[0], lambda: plan_layout(config, **given))


@pytest.mark.parametrize("flag", ["reshard", "reshard_root"])
@pytest.mark.parametrize("value", [1, 0, "yes", None], ids=repr)
def test_a_layout_s_flags_are_on_or_off(flag, value):
    refused(TypeError, [flag, "True or False"], lambda: Layout(data=2, **{flag: value}))


# -- other commands


@pytest.mark.parametrize(
    "main, arguments, says",
    [
        (course.main, ["record", "--minutes", "5", "--minutes", "9"], "give it once"),
        (course.main, ["record", "--minutes", "0"], "from 1 to 10,000"),
        (course.main, ["record", "--minute", "5"], "unrecognized"),
        (course.main, ["recrod"], "Did you mean record?"),
        (course.main, ["soak", "--only", "ofline"], "Did you mean offline?"),
        (course.main, ["soak", "--seed", "1", "--seed", "2"], "give it once"),
        (course.main, ["grade", "a", "--seconds", "1", "--seconds", "9"], "give it once"),
        (course.main, ["keep"], "DIR"),
        (course.main, ["keep", "a", "b"], "unrecognized"),
        (course.main, ["badges", "--chek"], "unrecognized"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_arguments_of_the_course(main, arguments, says, capsys):
    refuses(arguments, capsys, says, main=main)


@pytest.mark.parametrize(
    "names, says",
    [
        (["gpt2"], "Did you mean openai-community/gpt2?"),
        (["openai-community/GPT2"], "Did you mean openai-community/gpt2?"),
        (["google-t5/t5-small"], "none of the models of the calculator"),  # known, and not listed
        (["openai-community/gpt2", "nosuch"], "'nosuch'"),
        ([""], "''"),
        (["../gpt2"], "none of the models"),
        (["x" * 9999], "none of the models"),
    ],
    ids=lambda value: "".join(value)[:30],
)
def test_the_calculator_is_made_of_its_models(names, says, monkeypatch):
    monkeypatch.setattr(make, "write_file", None)
    monkeypatch.setattr(make, "planned", None)
    refused(ValueError, says, lambda: make.make(names))


DAMAGED = {
    "empty": lambda whole: b"",
    "zeros": lambda whole: bytes(99),
    "half": lambda whole: whole[: len(whole) // 2],
    "a byte short": lambda whole: whole[:-1],
    "text": lambda whole: b"{}",
    "utf-16": lambda whole: "{}".encode("utf-16"),
    "no plans": lambda whole: make.lzma.compress(b"{}"),
    "a list": lambda whole: make.lzma.compress(b"[]"),
    "no json": lambda whole: make.lzma.compress(b"{"),
    "latin-1": lambda whole: make.lzma.compress('{"é": 1}'.encode("latin-1")),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_of_the_calculator_is_named(damage, tmp_path, monkeypatch):
    file = tmp_path / "plans.json.xz"
    file.write_bytes(damage(make.FILE.read_bytes()))
    before = file.read_bytes()
    monkeypatch.setattr(make, "FILE", file)
    refused(ValueError, str(file), make.kept_models)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "arguments",
    [["--larg"], ["x"], ["--large", "--large"], ["--out="], ["--out", "."], ["--out", "no/x.zip"]],
    ids=" ".join,
)
def test_arguments_of_the_bundle(arguments, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bundle", *arguments])
    monkeypatch.setattr(bundle, "bundle", None)
    refuses([], capsys, main=lambda _: bundle.main())
