"""Models that read images in a text, or speech: small and random, against real tensors."""

import pytest
import torch
import transformers as library

from tests.attack import refused
from tests.night import few_by_day
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models import images
from tight_fit.models.config import CannotPlan
from tight_fit.plans.model import ModelStep, measured, plan_model, plan_model_step
from tight_fit.trace.fake_mode import FakeTensorMode
from tight_fit.trace.fake_tensors import FakeValues
from tight_fit.trace.known_values import known_values

TEXT = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 512,
    "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
GRID = {"depth": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
TOKENS = {"image_token_id": 290, "video_token_id": 291}
SIGLIP = SEES | {"model_type": "siglip_vision_model"}


def grid(kind, **sees):
    return kind(
        text_config=TEXT | {"rope_parameters": ROPE}, vision_config=GRID | {"num_heads": 4} | sees,
        vision_start_token_id=292, vision_end_token_id=293, **TOKENS,
    )  # fmt: skip


def text(kind):
    return TEXT | {"model_type": kind}


WIDE = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
CONFIGS = {
    "qwen2_vl": lambda: grid(library.Qwen2VLConfig, embed_dim=32, hidden_size=32),
    "qwen2_5_vl": lambda: grid(
        library.Qwen2_5_VLConfig, **WIDE, fullatt_block_indexes=[1], window_size=56
    ),
    "qwen3_vl": lambda: grid(
        library.Qwen3VLConfig, **WIDE, deepstack_visual_indexes=[0], num_position_embeddings=64
    ),
    "llava": lambda: library.LlavaConfig(
        text_config=text("llama"),
        vision_config=SEES | {"model_type": "clip_vision_model"},
        image_token_index=290,
    ),
    "gemma3": lambda: library.Gemma3Config(
        text_config=TEXT, vision_config=SEES, mm_tokens_per_image=4, image_token_index=290,
        boi_token_index=291, eoi_token_index=292,
    ),
    "paligemma": lambda: library.PaliGemmaConfig(
        text_config=text("gemma"), vision_config=SIGLIP, image_token_index=290, projection_dim=32,
        hidden_size=32,
    ),
    "internvl": lambda: library.InternVLConfig(
        text_config=text("qwen2"),
        vision_config=SEES | {"image_size": [56, 56], "patch_size": [14, 14]},
        image_token_id=290,
        image_seq_length=4,
    ),
    "mistral3": lambda: library.Mistral3Config(
        text_config=text("mistral"),
        vision_config=SEES | {"model_type": "pixtral", "head_dim": 8},
        image_token_index=290,
        spatial_merge_size=2,
    ),
}  # fmt: skip
SPEECH = {
    "vocab_size": 300, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "num_mel_bins": 16, "max_source_positions": 50,
    "max_target_positions": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 3,
}  # fmt: skip


def step_of(name, **fields):
    if name == "whisper":
        return ModelStep(library.WhisperConfig(**SPEECH), **{"batch_size": 2} | fields)
    fields = {"batch_size": 2, "length": 40, "side": 56, "task": "image-text-to-text"} | fields
    return ModelStep(CONFIGS[name](), **fields)


LORA = {"lora_rank": 2, "lora_targets": "all-linear"}
TWICE = {"precision": "bf16", "batch_size": 4, "accumulation": 2}
FIELDS = [
    ("qwen2_5_vl", LORA | {"checkpointing": True}),
    ("qwen2_5_vl", {"attention": "eager", "side": 112, "length": 80}),
    ("whisper", TWICE | {"checkpointing": True}),
    ("qwen2_5_vl", LORA | TWICE),
    ("whisper", LORA | {"attention": "eager"}),
]


@pytest.mark.parametrize(
    "name, fields", few_by_day([*((name, {}) for name in (*CONFIGS, "whisper")), *FIELDS]), ids=str
)
def test_a_plan_is_what_the_real_step_takes(name, fields):
    step = step_of(name, **fields)
    real, planned = measured(step), plan_model_step(step, "cpu")
    assert planned.peak == real.peak and planned.parameters == real.parameters


def test_what_is_shortened_keeps_its_memory():
    """By `unique_consecutive`, which Qwen2.5-VL calls: on CPU and CUDA as large as its input."""
    real = torch.tensor([1, 1, 2, 2, 2]).unique_consecutive(return_counts=True)
    with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), known_values():
        planned = torch.tensor([1, 1, 2, 2, 2]).unique_consecutive(return_counts=True)
        assert all(len(one) == 2 for one in planned) and planned[1].tolist() == [2, 3]
    for one, other in zip(planned, real):
        assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 5 * 8


@pytest.mark.parametrize(
    "given, elements",
    [([3, 1, 3, 1, 1], 5), ([3.0, 1.0, 3.0, 1.0, 1.0], 5), ([True, False, True], 2)],
)
def test_unique_keeps_what_cuda_allocates(given, elements):
    """Values and counts in buffers as long as the input, but for truth values, which are counted
    first (PyTorch's UniqueCub.cu). A CPU's buffers are as long as what is found."""
    with FakeTensorMode(allow_non_fake_inputs=True), FakeValues(), known_values():
        tensor = torch.tensor(given)
        values, inverse, counts = torch.unique(tensor, return_inverse=True, return_counts=True)
        alone = tensor.unique()
        rows = torch.tensor([[3, 3], [1, 1], [3, 3]]).unique(dim=0)
    held = [one.untyped_storage().nbytes() // one.element_size() for one in (values, counts, alone)]
    assert held == [elements] * 3 and len(values) == len(alone) == len(counts) == 2
    assert inverse.untyped_storage().nbytes() == 8 * len(given)
    assert rows.untyped_storage().nbytes() == 8 * 4


def test_the_tasks_are_taken_from_the_configuration():
    assert step_of("qwen2_5_vl", task=None).task == "image-text-to-text"
    whisper = step_of("whisper")
    assert (whisper.task, whisper.tokens) == ("speech-to-text", SPEECH["max_target_positions"])


def test_images_stand_for_tokens_beside_512_of_text():
    """Qwen2.5-VL makes one token of 28 x 28 pixels."""
    step = ModelStep(library.Qwen2_5_VLConfig(), batch_size=1, side=448)
    assert images.tokens_of(step.config, 448) == 16 * 16
    assert step.tokens == 512 + 16 * 16 and step.image == (3, 448, 448)
    assert ModelStep(library.LlavaConfig(), batch_size=1).tokens == 512 + 24 * 24


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"side": 50}, "side=50 is no multiple of the 28 pixels"),
        ({"length": 4}, "length=4 leaves no token for text beside the 4 of an image"),
        ({"classes": 3}, "classes=3 is for a classifier"),
    ],
)
def test_what_cannot_be_is_said(fields, says):
    refused(ValueError, says, lambda: step_of("qwen2_5_vl", **fields))


def test_other_models_and_several_gpus_are_refused():
    says = "'image-text-to-text' is planned on one GPU, and not with"
    refused(ValueError, says, lambda: plan_step(step_of("llava"), parse("ddp=2"), "cpu"))
    idefics = library.Idefics3Config(text_config=text("llama"), vision_config=SEES)
    asked = {"batch_size": 1, "task": "image-text-to-text"}
    says = "What idefics3 reads beside text is not known here"
    refused(CannotPlan, says, lambda: ModelStep(idefics, **asked))
    whisper = library.WhisperConfig(**SPEECH)
    refused(ValueError, "side=56 is for images", lambda: plan_model(whisper, batch_size=1, side=56))
