"""Lines through traces that come with the package: what they give is what is traced anew."""

import json
import random
from dataclasses import replace
from functools import cache

import pytest
from transformers import LlamaConfig, T5Config

from tests.command.test_kept_traces import ALONE
from tests.small import configured, python
from tight_fit import gpus
from tight_fit.command import kept_traces, question, ship_traces
from tight_fit.command.answer import answers, step_of
from tight_fit.command.kept_traces import PART, SHIPPED, KeptTraces, ShippedLines
from tight_fit.command.question import Question
from tight_fit.command.ship import asked_of
from tight_fit.command.ship_traces import at, axes_of, line_of, ship, with_axes
from tight_fit.command.shipped_steps import OTHERS, steps_of
from tight_fit.models import names as model_names
from tight_fit.models.step import ModelStep
from tight_fit.plans import batch_line, chunk_lines
from tight_fit.plans.batch_line import general
from tight_fit.plans.model import trace_model_step
from tight_fit.plans.other_optimizer import optimizer_part, plain, with_adamw, with_optimizer
from tight_fit.plans.trace_line import equal, extended, fitted, grid

SMALL = configured(LlamaConfig, 32, 6, 4, 48, 640, num_key_value_heads=2)
STEP = ModelStep(SMALL, batch_size=2, precision="bf16")
ALL = {
    name: lines
    for name, values in model_names.known().items()
    if (lines := ShippedLines.of(values)).lines
}


@cache
def traced(*place):
    return trace_model_step(at(STEP, place))


@cache
def points():
    return {place: traced(*place) for place in [*grid(512), (5, 200)]}


@cache
def line():
    return fitted(points(), 512)


@pytest.fixture
def of_these_versions():
    if not ALL:
        pytest.skip("traced with other versions of the libraries")


@pytest.mark.parametrize("place", [(2, 128), (7, 136), (4, 177)])
def test_a_line_gives_the_trace_at_every_place(place):
    assert equal(line().at(place), traced(*place))
    sizes = traced(*place)[0].bytes
    sizes[-1] += 1
    try:
        assert not equal(line().at(place), traced(*place))
    finally:
        sizes[-1] -= 1


def test_micro_batches_beyond_two_are_computed():
    two, five = (replace(STEP, batch_size=10, accumulation=number) for number in (2, 5))
    line = fitted({place: trace_model_step(at(two, place)) for place in grid(512)}, 512, 2)
    assert equal(line.at((4, 144), 5), trace_model_step(at(five, (4, 144))))


@pytest.fixture(scope="module")
def adapters():
    """A classifier with adapters, and its line with both further axes."""
    step = replace(STEP, task="sequence-classification", lora_rank=8)
    with pytest.MonkeyPatch.context() as narrow:
        narrow.setitem(ship_traces.BESIDE, "lora_rank", ((4, 8), (32,)))
        line = with_axes(line_of(step, trace_model_step), step, axes_of(step), trace_model_step)
    return step, line


def test_a_line_reaches_other_classes_and_ranks(adapters, monkeypatch, tmp_path):
    step, line = adapters
    other = at(replace(step, classes=5, lora_rank=20), (6, 184))
    assert batch_line.usual(other) == (at(step, (6, 184)), {"classes": 5, "lora_rank": 20})
    assert equal(line.at((6, 184), 1, {"classes": 5, "lora_rank": 20}), trace_model_step(other))
    places = [{"lora_rank": 10}, {"lora_rank": 36}, {"classes": 1}, {"classes": 1001}, {"side": 8}]
    assert not any(line.at((6, 184), 1, place) for place in places)
    values = model_names.known()["openai-community/gpt2"]
    key = question.digest(general(step, "cuda"))
    monkeypatch.setattr(kept_traces, "SHIPPED", tmp_path)
    ShippedLines.write(values, {"versions": question.versions()}, {key: line}, {})
    assert json.dumps(ShippedLines.of(values).line(key).packed) == json.dumps(line.packed)
    assert equal(KeptTraces(values).computed("cuda", other), trace_model_step(other))
    assert KeptTraces(values).computed("cuda", replace(other, checkpointing=True)) is None


def test_a_line_of_fp32_gives_steps_with_tf32(monkeypatch, tmp_path):
    step = replace(STEP, precision="fp32")
    places = {place: trace_model_step(at(step, place)) for place in grid(512)}
    line, values = fitted(places, 512), model_names.known()["openai-community/gpt2"]
    monkeypatch.setattr(kept_traces, "SHIPPED", tmp_path)
    key = question.digest(general(step, "cuda"))
    ShippedLines.write(values, {"versions": question.versions()}, {key: line}, {})
    asked = at(replace(step, precision="tf32"), (7, 200))
    found = KeptTraces(values).computed("cuda", asked)
    assert equal(found, trace_model_step(asked)) and found[0].operations.tf32
    assert not KeptTraces(values).computed("cuda", at(step, (7, 200)))[0].operations.tf32


def test_ranks_may_be_reached_in_larger_steps(adapters, monkeypatch):
    step, line = adapters
    monkeypatch.setitem(ship_traces.BESIDE, "lora_rank", ((8,), (32,)))
    line = with_axes(line, step, [("lora_rank", 8)], trace_model_step)
    assert line.packed["axes"]["lora_rank"]["step"] == 8
    assert line.at((6, 184), 1, {"lora_rank": 24}) and not line.at((6, 184), 1, {"lora_rank": 20})


def test_traces_of_another_kind_make_no_axis(adapters):
    step, line = adapters
    other = replace(step, checkpointing=True)
    traces = {place: trace_model_step(at(other, place)) for place in grid(512, 2, 2)}
    assert extended(line, "classes", (2, 3, 1000), traces) is None
    (place, *_) = traces
    trace, parameters = trace_model_step(at(step, place))
    fewer = replace(trace, bytes=trace.bytes[:-1])
    assert extended(line, "classes", (2, 3, 1000), {place: (fewer, parameters)}) is None
    earlier = replace(trace, events=[*trace.events[1:], trace.events[0]])
    assert extended(line, "classes", (2, 3, 1000), {place: (earlier, parameters)}) is None


def test_a_single_example_has_a_line_of_its_own():
    one = replace(STEP, batch_size=1)
    line = line_of(one, trace_model_step)
    assert equal(line.at((1, 184)), trace_model_step(at(one, (1, 184))))
    assert line.at((2, 184)) is None


def test_a_line_ends_where_it_was_not_proven():
    """One example takes other operations."""
    assert not any(map(line().at, [(1, 128), (2, 120), (2, 520), (2, None)]))


def test_traces_that_are_on_no_line_make_none():
    trace, parameters = traced(5, 200)
    other = replace(trace, bytes=[*trace.bytes[:-1], trace.bytes[-1] + 4])
    assert fitted(points() | {(5, 200): (other, parameters)}, 512) is None
    assert fitted(points() | {(5, 201): (other, parameters)}, 512).packed["multiple"] == 8
    longer = replace(trace, bytes=[*trace.bytes, 4])
    assert fitted(points() | {(2, 128): (longer, parameters)}, 512) is None


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_loss_in_chunks_has_a_line(accumulation):
    """2 and 6 chunks of 256 tokens, and 32 of 336, which is as many as there are for 640 words."""
    step = replace(STEP, loss="chunked", accumulation=accumulation, batch_size=6)
    line = line_of(replace(step, accumulation=min(accumulation, 2)), trace_model_step)
    for place in [(2, 256), (4, 128), (6, 256), (32, 336)]:
        asked = at(step, place)
        assert equal(line.at(place, accumulation), trace_model_step(asked))
    # too few chunks, one that is smaller than the others, and tokens that no trace has shown
    assert not any(map(line.at, [(2, 128), (6, 264), (32, 257)]))


def test_chunks_that_are_not_alike_make_no_line():
    step = replace(STEP, loss="chunked")
    few, more = (trace_model_step(at(step, place))[0] for place in [(3, 256), (4, 256)])
    parts = chunk_lines.parts_of(few, more, 1)
    assert chunk_lines.with_chunks(few, parts, 1).events == more.events
    assert chunk_lines.with_chunks(more, parts, -1, 1).events == few.events
    two = trace_model_step(at(step, (2, 256)))[0]
    assert chunk_lines.with_chunks(few, parts, -1).events == two.events
    assert chunk_lines.parts_of(few, few, 1) is None and chunk_lines.parts_of(few, more, 2) is None
    index, length = parts["storages"][0]
    sizes = [*more.bytes]
    sizes[index] += 4
    assert chunk_lines.with_chunks(replace(more, bytes=sizes), parts, -1, 1) is None
    names = [*more.made_by]
    names[index - 1 + length] += "other"
    assert chunk_lines.parts_of(few, replace(more, made_by=names), 1) is None


def test_a_sample_of_the_lines_is_what_is_traced_today(of_these_versions):
    """The planner's code draws them: where they differ, `python -m tight_fit.command.ship_traces
    --again` traces all anew."""
    draw = random.Random(question.code())
    for name in draw.sample(sorted(ALL), 2):
        step, lines = step_of(asked_of(name)), ALL[name].lines
        there = [step for step in steps_of(step) if digest_of(step) in lines]
        assert {digest_of(step) for step in there} == {key for key in lines if PART not in key}
        same_as_traced(name, draw.choice(there), draw)


def test_a_sample_with_another_optimizer_is_what_is_traced_today(of_these_versions):
    """Its part and the line of another step are put together, which nobody has traced."""
    draw = random.Random(question.code())
    name = draw.choice([name for name, shipped in ALL.items() if PART in "".join(shipped.lines)])
    step, lines = step_of(asked_of(name)), ALL[name].lines
    there = [
        changed
        for body in steps_of(step)
        if digest_of(body) in lines and (body.offload is None)
        for other in OTHERS
        if (changed := possible(body, other)) and PART + digest_of(plain(changed)) in lines
        if not (body.checkpointing and name.startswith("google-t5/"))  # see below
    ]
    assert len(there) > 5
    for changed in draw.sample(there, 2):
        same_as_traced(name, changed, draw)


def possible(step, change):
    try:
        return replace(step, **change)
    except ValueError:
        return None


def digest_of(step):
    return question.digest(general(step, "cuda"))


def same_as_traced(name, step, draw):
    least, few = (64, 128) if step.offload == "activations" else (2, 16)
    length = draw.randrange(least if least > 9 else few, 65) * 8 if step.tokens else None
    if step.loss == "chunked":  # in chunks that are alike
        length = draw.choice([256, 512])
    asked = at(step, (draw.randrange(least, least + 38), length))
    found = KeptTraces(asked_of(name).values).computed("cuda", asked)
    assert found is not None
    assert equal(found, trace_model_step(asked)), f"{name}: trace and ship it anew"


def test_an_optimizer_is_put_in_place_of_another():
    """What a step with another optimizer does, from a plain step of it and one with AdamW."""
    two = replace(STEP, batch_size=6, accumulation=2, checkpointing=True, precision="fp16")
    usual = trace_model_step(two)
    for other in ({"optimizer": "adafactor"}, {"offload": "optimizer"}):
        alone = plain(replace(two, **other))
        part = optimizer_part(trace_model_step(alone), trace_model_step(with_adamw(alone)))
        found = with_optimizer(usual, json.loads(json.dumps(part)), 2)
        assert equal(found, trace_model_step(replace(two, **other)))
    unscaled = plain(replace(STEP, optimizer="sgd"))
    part = optimizer_part(trace_model_step(unscaled), trace_model_step(with_adamw(unscaled)))
    assert not equal(
        with_optimizer(usual, part, 2), trace_model_step(replace(two, optimizer="sgd"))
    )
    adapters = trace_model_step(replace(STEP, lora_rank=4))
    assert with_optimizer(adapters, part) is None
    early = replace(STEP, optimizer_in_backward=True, max_grad_norm=None)
    assert with_adamw(STEP) is None and with_adamw(early) is None
    assert plain(replace(STEP, compile=True)).compile, "no part is known of compiled layers"


def test_embeddings_that_are_shared_may_have_their_gradient_later():
    """As a loss in chunks makes it, which a plain step does not have."""
    shared = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    tied = replace(STEP, config=configured(LlamaConfig, 32, 6, 4, 48, 640, **shared))
    asked = replace(tied, loss="chunked", batch_size=4, length=256, optimizer="adafactor")
    alone = plain(asked)
    part = optimizer_part(trace_model_step(alone), trace_model_step(with_adamw(alone)))
    body = trace_model_step(with_adamw(asked))
    assert equal(with_optimizer(body, part), trace_model_step(asked))
    assert with_optimizer(body, part | {"gradients": part["gradients"][1:]}) is None


def test_a_part_that_leaves_what_was_freed_with_adamw_is_none():
    """T5 with checkpointing frees two storages at the end of the step."""
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, vocab_size=640)
    step = ModelStep(config, 2, 128, task="seq2seq-lm")
    alone = plain(replace(step, optimizer="adafactor"))
    part = optimizer_part(trace_model_step(alone), trace_model_step(with_adamw(alone)))
    usual, again = (trace_model_step(replace(step, checkpointing=on)) for on in (False, True))
    assert equal(with_optimizer(usual, part), trace_model_step(alone))
    assert with_optimizer(again, part) is None


def test_a_single_example_has_the_optimizer_of_several():
    one, several = (replace(STEP, batch_size=number, optimizer="lion") for number in (1, 4))
    assert plain(one) == plain(several)


def test_a_line_of_offloaded_activations_ends_where_some_are_too_small():
    step = replace(STEP, offload="activations")
    drawn = line_of(replace(step, length=None), trace_model_step)
    assert equal(drawn.at((80, 200)), trace_model_step(at(step, (80, 200))))
    assert drawn.at((8, 128)) is None and drawn.at((4096, 128)) is None
    drawn.packed["smallest"] *= 10**6
    assert drawn.at((80, 200)) is None


@pytest.mark.parametrize(
    "fields, gpu",
    [
        ({"batch_size": 6, "precision": "fp16", "length": 333}, "T4"),
        ({"batch_size": 30, "accumulation": 3}, "8GB"),
        ({"batch_size": 9, "precision": "fp16", "optimizer": "adamw8bit"}, "8GB"),
    ],
)
def test_an_answer_by_a_line_is_that_of_a_plan_made_anew(fields, gpu, no_trace, of_these_versions):
    name = "FacebookAI/roberta-base"
    asked = Question(name, name, model_names.known()[name], fields, gpus.find(gpu))
    *_, anew = answers(replace(asked, quick=True), fresh=True)
    no_trace()
    *_, found = answers(replace(asked, quick=True))
    assert json.dumps(found, sort_keys=True) == json.dumps(anew, sort_keys=True)
    *_, advised = answers(asked)
    assert advised["would_fit"] == [] and advised["largest_batch"] >= fields["batch_size"]


def test_a_first_question_needs_no_pytorch(of_these_versions):
    typed = "distilbert --gpu RTX4090 --batch 9 --length 177"
    ended = python("-c", ALONE, *typed.split())
    assert (ended.returncode, ended.stderr) == (0, "") and "YES" in ended.stdout


def test_other_versions_and_damaged_files_have_no_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_traces, "SHIPPED", tmp_path / "traces")
    values = model_names.known()["openai-community/gpt2"]
    key = question.digest(general(STEP, "cuda"))
    head = {"model": "m", "versions": question.versions(), "facts": {"trainer": "x"}}
    ShippedLines.write(values, head, {key: line()}, {})
    assert KeptTraces(values).fact("trainer", lambda: pytest.fail("made")) == "x"
    found = KeptTraces(values).computed("cuda", at(STEP, (3, 200)))
    assert equal(found, traced(3, 200))
    assert KeptTraces(values).computed("cuda", replace(STEP, checkpointing=True)) is None
    assert KeptTraces(values).computed("cpu", STEP) is None
    with monkeypatch.context() as changed:
        other = question.versions() | {"torch": "9.9"}
        changed.setattr(question, "versions", lambda: other)
        assert not ShippedLines.of(values).lines
    file = kept_traces.place_of(values)
    file.write_bytes(file.read_bytes()[:-9])
    assert not ShippedLines.of(values).lines and ShippedLines.of({}).line(key) is None


def test_lines_are_small():
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 1_500_000


def test_shipping_writes_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(kept_traces, "SHIPPED", tmp_path / "traces")
    values = json.loads(SMALL.to_json_string(use_diff=False)) | {"architectures": None}
    monkeypatch.setattr(model_names, "known", lambda: {"a/b": values})
    ship(["a/b"], few=True)
    (key,) = ShippedLines.of(values).lines
    assert key == question.digest(general(step_of(asked_of("a/b")), "cuda"))
    later = question.versions() | {"torch": "9.9"}
    monkeypatch.setattr(question, "versions", lambda: later)
    assert not ShippedLines.of(values).lines, "of another release of PyTorch"
    ship(["a/b"], again=True)
    assert list(ShippedLines.of(values).lines) == [key]
