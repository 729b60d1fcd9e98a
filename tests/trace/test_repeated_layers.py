"""Layers traced once against all layers traced: the same trace, byte by byte, kernel by kernel."""

import pytest
import torch
import transformers as library
from torch import nn

from helpers import models
from helpers.recipe import Recipe
from tests.night import few_by_day
from tests.plans.test_hf_model import CONFIGS
from tight_fit.models.made import Logits
from tight_fit.models.step import ModelStep
from tight_fit.plans import model as hf_plan
from tight_fit.plans.model import trace_model_step
from tight_fit.trace import splice
from tight_fit.trace.repeated_layers import RepeatedLayers, stacks_of
from tight_fit.trace.splice import NotAlike
from tight_fit.trace.tracker import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")
DEEP = 6  # layers; five of one kind or more repeat
WORDS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
HARD = {"precision": "bf16", "checkpointing": True, "accumulation": 2, "optimizer": "adamw8bit"}
REPEAT = [
    *((name, {}) for name in ("bert", "mixtral", "llama", "bart", "dinov2", "deberta")),
    ("t5", HARD),
    ("llama", {"precision": "fp16", "accumulation": 4, "optimizer": "adafactor"}),
    ("llama", {"frozen": 1, "weights": "bf16"}),
    ("modernbert", {}),  # layers of two kinds, every third is global
    ("deepseek", {}),  # the first layer is dense
    ("llama", {"lora_rank": 4, "base": "nf4", "lora_targets": "all-linear"}),
    ("llama", {"loss": "chunked", "precision": "bf16", "accumulation": 2, "attention": "eager"}),
    ("llama", {"offload": "activations", "precision": "bf16"}),
    ("llama", {"offload": "optimizer"}),
    ("llama", {"optimizer_in_backward": True, "max_grad_norm": None}),
    ("gpt2", {"task": "dpo", "precision": "bf16", "lora_rank": 4}),
    ("llama", {"task": "grpo", "completion": 4, "reference": "model"}),
]


def deep(name: str, layers: int = DEEP):
    """A small configuration with so many layers in each stack."""
    config = models.config(Recipe("deberta")) if name == "deberta" else CONFIGS[name]()
    layers = 14 if name == "modernbert" else layers
    values = config.to_dict()
    dropped = ("layer_types", "model_type", "mlp_layer_types", "out_features", "stage_names")
    kept = {key: value for key, value in values.items() if key not in (*dropped, "out_indices")}
    return type(config)(**kept | {word: layers for word in WORDS if word in values})


@pytest.mark.parametrize(
    "name, fields", few_by_day(REPEAT), ids=lambda value: str(value).replace(" ", "")
)
def test_a_trace_with_layers_left_out_is_that_of_all_layers(name, fields, monkeypatch):
    ran, refused = [], []
    left_out, whole = RepeatedLayers.left_out, splice.whole

    def seen(repeated, tracker):
        ran.append(min(stack.left_out for stack in repeated.stacks))
        return left_out(repeated, tracker)

    def told(*arguments):
        try:
            return whole(*arguments)
        except NotAlike as refusal:
            refused.append(str(refusal))
            raise

    monkeypatch.setattr(RepeatedLayers, "left_out", seen)
    monkeypatch.setattr(splice, "whole", told)
    config = deep(name)
    image = ModelStep(config).reads == "image"
    step = ModelStep(config, batch_size=4, length=None if image else 24, **fields)
    few, all_of_them = (trace_model_step(step, "cuda", all_layers=on) for on in (False, True))
    assert ran and min(ran) > 0, "no layer was left out"
    assert not refused
    assert few == all_of_them and few[0].operations == all_of_them[0].operations
    assert few[0].reached == all_of_them[0].reached


class Uneven(nn.Module):
    """A stack whose layers look alike and do not do the same."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        self.head = nn.Linear(8 * (8 if kind == "joins" else 1), 2)

    def in_turn(self):
        if self.kind == "indexed":
            yield from (self.layers[number] for number in range(8))
            return
        for _ in range(2 if self.kind == "twice" else 1):
            yield from self.layers

    def forward(self, x):
        outputs = []
        for number, layer in enumerate(self.in_turn()):
            x = layer(x)
            if self.kind == "half" and number % 2:
                x = torch.relu(x)
            outputs.append(x)
        return Logits(self.head(torch.cat(outputs, -1) if self.kind == "joins" else x))


@pytest.mark.parametrize("kind", ["joins", "half", "indexed", "twice"])
def test_layers_that_differ_in_what_they_do_are_all_traced(kind, monkeypatch):
    """The planner falls back to the whole trace; the error would be silent."""
    step = ModelStep(CONFIGS["bert"](), batch_size=4)

    def batch(model, step):
        return {"x": torch.zeros(4, 8), "labels": torch.zeros(4, dtype=torch.long)}

    monkeypatch.setattr(hf_plan, "empty", lambda step, recompute: Uneven(kind))
    assert stacks_of(Uneven(kind)), "the layers look alike"
    few, whole = (
        hf_plan.trace_model_step(step, "cuda", all_layers=whole, make_batch=batch)
        for whole in (False, True)
    )
    assert few == whole


@pytest.mark.parametrize(
    "config, kept",
    [
        (lambda: deep("bert", 12), [[0, 1, 2, 11]]),
        (lambda: deep("bert", 4), []),
        (lambda: deep("bart"), [[0, 1, 2, 5], [0, 1, 2, 5]]),
        (lambda: deep("t5"), [[0, 1, 2, 3, 5]]),  # the first has the positions' bias
        (lambda: library.ConvNextConfig(depths=[2, 2, 9, 2], drop_path_rate=0.1), []),
        (lambda: deep("modernbert"), [[*range(10), 13]]),  # every third layer is global
    ],
    ids=["plain", "short", "two-stacks", "first-differs", "each-another-dropout", "two-kinds"],
)
def test_which_layers_run(config, kept):
    with torch.device("meta"):
        model = library.AutoModel.from_config(config())
    assert [stack.kept for stack in stacks_of(model)] == kept


def lines() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(9))})


def test_a_layer_that_is_frozen_is_another():
    model = lines()
    assert stacks_of(model)[0].kept == [0, 1, 2, 8]
    for layer in list(model["layers"])[:3]:
        layer.requires_grad_(False)
    assert stacks_of(model)[0].kept == [0, 1, 2, 3, 4, 5, 8]


def test_a_shortened_list_is_whole_again_even_after_an_error():
    model = lines()
    with pytest.raises(NotAlike), RepeatedLayers(model).shortened():
        assert len(model["layers"]) == 4
        raise NotAlike("something")
    assert type(model["layers"]) is nn.ModuleList and len(model["layers"]) == 9


@pytest.mark.parametrize("of_one_layer", [True, False])
def test_gradients_in_one_memory_are_those_of_one_layer_or_refused(of_one_layer):
    model = lines()
    bucket = torch.zeros(20)
    first, second = model["layers"][0], model["layers"][0 if of_one_layer else 1]
    first.weight.grad, second.bias.grad = bucket[:16].view(4, 4), bucket[16:]
    repeated = RepeatedLayers(model)
    if of_one_layer:
        repeated.add_gradients(Tracker(None))
        assert all(layer.weight.grad is None for layer in list(model["layers"])[1:])
        return
    with pytest.raises(NotAlike, match="share their memory"):
        repeated.add_gradients(Tracker(None))
