"""The planner on models that the course never mentions, small and random, against real tensors."""

import json

import numpy as np
import pytest
import torch
import transformers as library

from tests.attack import refused
from tests.night import few_by_day
from tight_fit.models import config as hf_config
from tight_fit.models import hub
from tight_fit.models.config import CannotPlan
from tight_fit.models.local import MIRROR
from tight_fit.plans.model import ModelStep, measured, plan_model, plan_model_step

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
NARROW = {
    "vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
SWIN = {
    "image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4
}  # fmt: skip
CONFIGS = {
    "bert": lambda: library.BertConfig(**TEXT),
    "roberta": lambda: library.RobertaConfig(**TEXT | {"max_position_embeddings": 66}),
    "modernbert": lambda: library.ModernBertConfig(
        **TEXT, local_attention=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2,
    ),
    "gpt2": lambda: library.GPT2Config(  # tied weights
        vocab_size=99, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=1,
        eos_token_id=2,
    ),
    "llama": lambda: library.LlamaConfig(**TEXT, num_key_value_heads=2),  # grouped queries
    "qwen3": lambda: library.Qwen3Config(
        **TEXT, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    ),
    "gemma3": lambda: library.Gemma3TextConfig(
        **TEXT, num_key_value_heads=2, head_dim=8, sliding_window=16
    ),
    "t5": lambda: library.T5Config(**T5),  # tied, two stacks
    "bart": lambda: library.BartConfig(**NARROW),
    "pegasus": lambda: library.PegasusConfig(**NARROW),  # positions that no gradient reaches
    "resnet": lambda: library.ResNetConfig(embedding_size=8, **STAGES),  # BatchNorm
    "convnext": lambda: library.ConvNextConfig(**STAGES, image_size=64, drop_path_rate=0.1),
    "swin": lambda: library.SwinConfig(**SWIN),
    "dinov2": lambda: library.Dinov2Config(  # a mask token that never trains
        image_size=56, patch_size=14, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
    "mixtral": lambda: library.MixtralConfig(**TEXT, num_key_value_heads=2, num_local_experts=4),
    "deepseek": lambda: library.DeepseekV3Config(
        **TEXT, moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2,
        first_k_dense_replace=1, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8,
    ),
    "mamba": lambda: library.MambaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
    # Images with a class for each pixel; pairs of image and text.
    "segformer": lambda: library.SegformerConfig(
        **STAGES | {"depths": [1] * 4}, image_size=64, decoder_hidden_size=16,
        num_attention_heads=[1, 2, 2, 4], num_labels=5,
        architectures=["SegformerForSemanticSegmentation"],
    ),
    "clip": lambda: library.CLIPConfig(
        text_config=TEXT | {"max_position_embeddings": 20, "eos_token_id": 2, "bos_token_id": 1},
        vision_config=TEXT | {"image_size": 32, "patch_size": 8}, projection_dim=16,
    ),
}  # fmt: skip
HARD = {"precision": "bf16", "checkpointing": True, "accumulation": 2, "optimizer": "adamw8bit"}
BRAIN = {"weights": "bf16"}  # without and with autocast, frozen beside adapters, with 8-bit states
MORE = [
    ("gpt2", HARD), ("t5", HARD), ("mixtral", HARD), ("resnet", {"precision": "bf16"}),
    ("gpt2", {"frozen": 2, "precision": "fp16"}), ("bart", {"lora_rank": 4}),
    ("gpt2", {"task": "sequence-classification", "classes": 5}), ("bert", {"task": "masked-lm"}),
    ("swin", {"optimizer": "adafactor", "accumulation": 4}), ("resnet", BRAIN),
    ("bert", BRAIN | {"precision": "bf16"}), ("gpt2", BRAIN | {"optimizer": "adamw8bit"}),
    ("llama", {"weights": "fp16", "lora_rank": 4, "precision": "fp16"}),
    ("clip", {"lora_rank": 2, "precision": "bf16"}),
]  # fmt: skip


def step(name: str, **fields) -> ModelStep:
    config = CONFIGS[name]()
    text = ModelStep(config).reads in ("text", "texts")
    if name == "segformer":
        fields["side"] = 64
    return ModelStep(config, batch_size=4, length=24 if text else None, **fields)


def same(planned, real) -> bool:
    assert planned.peak == real.peak and planned.at_peak == real.at_peak
    assert planned.parameters == real.parameters and planned.flops == real.flops
    return np.array_equal(planned.timeline, real.timeline)


def words(value) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value.values())) or "plain"


@pytest.mark.parametrize(
    "name, fields", few_by_day([*((name, {}) for name in CONFIGS), *MORE]), ids=words
)
def test_the_plan_is_what_real_tensors_take_to_the_byte(name, fields):
    asked = step(name, **fields)
    assert same(plan_model_step(asked, "cpu"), measured(asked))


@pytest.mark.parametrize(
    "config",
    [
        library.MobileNetV2Config(image_size=64, depth_multiplier=0.25),
        library.Swinv2Config(**SWIN),
    ],
    ids=lambda config: config.model_type,
)
def test_updates_in_place_of_a_view_differ_for_a_moment_and_never_at_the_peak(config):
    """Real tensors undo a view by strides, fake ones by its inverse: one more or one less."""
    asked = ModelStep(config, batch_size=4)
    planned, real = plan_model_step(asked, "cpu"), measured(asked)
    assert (planned.peak, planned.at_peak, planned.flops) == (real.peak, real.at_peak, real.flops)
    assert abs(len(planned.timeline) - len(real.timeline)) <= 0.01 * len(real.timeline)


@pytest.mark.parametrize(
    "config",
    [
        library.DebertaConfig(**TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
        library.LongformerConfig(**TEXT | {"max_position_embeddings": 66}, attention_window=8),
        library.BartConfig(vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2),
        library.T5Config(vocab_size=100, d_model=64, num_layers=2, decoder_start_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_models_whose_shapes_follow_from_their_batch_are_planned(config):
    """By a tensor of one number, or the tokens that end texts: values of the batch are followed."""
    asked = ModelStep(config, task="sequence-classification", batch_size=2, length=32)
    planned, real = plan_model_step(asked, "cpu"), measured(asked)
    assert (planned.peak, planned.at_peak, planned.flops) == (real.peak, real.at_peak, real.flops)


def test_a_classifier_that_knows_no_token_that_ends_a_text_is_refused():
    config = library.BartConfig(**NARROW, eos_token_id=None)
    asked = ModelStep(config, task="sequence-classification", batch_size=2, length=32)
    refused(CannotPlan, "bart cannot be planned", lambda: plan_model_step(asked, "cpu"))


@pytest.mark.parametrize("name", ["t5", "mixtral", "resnet"])
def test_parameters_are_the_unique_storages(name):
    """Counted without the planner: tied weights once, buffers too, on a model made anew."""
    asked = step(name)
    net = hf_config.class_of(asked.config, asked.task)(CONFIGS[name]())
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*net.parameters(), *net.buffers()]
        if tensor.numel()
    }
    planned = plan_model_step(asked, "cpu")
    assert planned.at_peak["parameters"] == sum(storages.values())
    assert planned.parameters == sum(parameter.numel() for parameter in net.parameters())


def test_on_cuda_attention_with_dropout_keeps_no_probabilities():
    """A CPU has no fused attention with dropout; on a GPU nothing grows with the squared length."""
    short, long = (
        plan_model_step(ModelStep(CONFIGS["gpt2"](), 4, length, precision="bf16"), "cuda")
        for length in (32, 64)
    )
    assert long.at_peak["activations"] < 2.1 * short.at_peak["activations"]


def test_tasks_are_the_usual_ones():
    usual = {
        "bert": "sequence-classification", "gpt2": "causal-lm", "t5": "seq2seq-lm",
        "resnet": "image-classification", "segformer": "semantic-segmentation",
        "clip": "contrastive",
    }  # fmt: skip
    assert {name: ModelStep(CONFIGS[name]()).task for name in usual} == usual
    for named, task in (
        ("BertForTokenClassification", "token-classification"),
        ("BertForMaskedLM", "sequence-classification"),
    ):
        assert ModelStep(library.BertConfig(**TEXT, architectures=[named])).task == task


def test_weights_have_the_dtype_of_the_configuration_unless_told_otherwise(tmp_path):
    """As config.json names it, by its old name and its new one; fp16 cannot be trained."""
    for word, stored, weights in (
        ("torch_dtype", "bfloat16", "bf16"),
        ("dtype", "bfloat16", "bf16"),
        ("dtype", "float16", "fp32"),
        ("vocab_size", 99, "fp32"),
    ):
        values = CONFIGS["llama"]().to_diff_dict() | {"model_type": "llama"}
        values.pop("dtype", None)
        config = hf_config.read(written(tmp_path, json.dumps(values | {word: stored})))
        assert ModelStep(config).weights == weights, (word, stored)
        assert ModelStep(config, weights="fp32").weights == "fp32"
    half = {"weights": "fp16"}
    assert ModelStep(CONFIGS["llama"](), lora_rank=2, **half).weights == "fp16"
    refused(ValueError, "cannot be trained", lambda: ModelStep(CONFIGS["llama"](), **half))


def test_configurations_come_from_files_and_are_not_changed(tmp_path):
    config = CONFIGS["bert"]()
    config.save_pretrained(tmp_path)
    before = config.to_dict()
    plans = [
        plan_model(source, device="cpu", batch_size=2, length=16)
        for source in (config, tmp_path, tmp_path / "config.json")
    ]
    assert len({planned.peak for planned in plans}) == 1 and config.to_dict() == before


def test_a_configuration_of_the_hub_comes_from_the_mirror(tmp_path, monkeypatch):
    CONFIGS["bert"]().save_pretrained(tmp_path / "models" / "somebody" / "bert")
    monkeypatch.setenv(MIRROR, str(tmp_path))
    assert hf_config.read("somebody/bert").hidden_size == 64
    monkeypatch.setattr(hub, "unreachable", lambda repo: "no answer")
    with pytest.raises(hub.HubUnavailable, match="somebody/else cannot be had .no answer"):
        hf_config.read("somebody/else")


STEPS = {  # tests/attack has those that are refused for every model
    "none or several": ("t5", {"frozen": 1}),
    "query and value": ("resnet", {"lora_rank": 2}),
    "no gradient checkpointing": ("resnet", {"checkpointing": True}),
}
MODELS = {
    "for any task that is planned": lambda: library.EncodecConfig(),
    "depend on their values": lambda: library.SwitchTransformersConfig(
        **T5, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
    ),
}  # fmt: skip
FILES = {
    "no model_type": "{}",
    "is not JSON": "{",
    "which is not a text": '{"model_type": ["bert"]}',
    "architectures=3, which is not a list": '{"model_type": "bert", "architectures": 3}',
    "never run here": '{"model_type": "mine", "auto_map": {"AutoModel": "mine.Mine"}}',
}


@pytest.mark.parametrize("words", [*STEPS, *MODELS, *FILES])
def test_what_cannot_be_planned_says_why_in_one_sentence(words, tmp_path):
    def make():
        if words in STEPS:
            name, fields = STEPS[words]
            return plan_model_step(step(name, **fields), "cpu")
        if words in MODELS:
            return plan_model(MODELS[words](), length=8)
        return plan_model(written(tmp_path, FILES[words]))

    refused((ValueError, FileNotFoundError), words, make)


def written(folder, text):
    path = folder / "config.json"
    path.write_text(text)
    return path


def test_nothing_is_left_changed_behind():
    """The fake step leaves alone what real ones use: the same after a refusal."""
    first = plan_model_step(step("bert"), "cpu")
    with pytest.raises(CannotPlan):
        plan_model_step(step("resnet", checkpointing=True), "cpu")
    assert np.array_equal(first.timeline, plan_model_step(step("bert"), "cpu").timeline)
    assert type(torch.zeros(1)) is torch.Tensor


def test_a_model_that_leaves_out_layers_at_random_is_planned_with_all():
    """transformers 5.17 draws a number also where the probability is 0."""
    configs = (
        library.BartConfig(**NARROW, encoder_layerdrop=dropped, decoder_layerdrop=dropped)
        for dropped in (0.0, 0.5)
    )
    none, half = (plan_model(one, batch_size=2, length=16, device="cpu") for one in configs)
    assert half.flops == none.flops and half.peak - none.peak in range(4096)
