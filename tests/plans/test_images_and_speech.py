"""Models that read images in a text, or speech: small and random, against real tensors."""

import pytest
import transformers as library

from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models import images
from tight_fit.models.config import CannotPlan
from tight_fit.plans.model import ModelStep, measured, plan_model, plan_model_step

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


@pytest.mark.parametrize("name", [*CONFIGS, "whisper"])
def test_a_plan_is_what_the_real_step_takes(name):
    step = step_of(name)
    real, planned = measured(step), plan_model_step(step, "cpu")
    assert planned.peak == real.peak and planned.parameters == real.parameters


FIELDS = {
    "bf16": {"precision": "bf16"},
    "checkpointing": {"checkpointing": True},
    "accumulation": {"batch_size": 4, "accumulation": 2},
    "LoRA": {"lora_rank": 2, "lora_targets": "all-linear"},
    "eager attention": {"attention": "eager"},
    "larger images": {"side": 112, "length": 80},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "whisper"])
def test_so_it_is_with_each_technique(name, fields):
    if name == "whisper":
        fields = {key: value for key, value in fields.items() if key not in ("side", "length")}
    step = step_of(name, **fields)
    assert plan_model_step(step, "cpu").peak == measured(step).peak


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
    "fields, error, says",
    [
        ({"side": 50}, ValueError, "side=50 is no multiple of the 28 pixels .* use 28"),
        ({"length": 4}, ValueError, "length=4 leaves no token for text beside the 4 of an image"),
        ({"classes": 3}, ValueError, "classes=3 is for a classifier"),
        ({"side": 0}, ValueError, "side"),
    ],
)
def test_what_cannot_be_is_said(fields, error, says):
    with pytest.raises(error, match=says):
        step_of("qwen2_5_vl", **fields)


def test_several_gpus_are_refused_in_a_sentence():
    with pytest.raises(
        ValueError, match="'image-text-to-text' is planned on one GPU, and not with"
    ):
        plan_step(step_of("llava"), parse("ddp=2"), "cpu")


def test_models_that_read_otherwise_are_named():
    config = library.Idefics3Config(text_config=text("llama"), vision_config=SEES)
    with pytest.raises(CannotPlan, match="What idefics3 reads beside text is not known here"):
        ModelStep(config, batch_size=1, task="image-text-to-text")
    with pytest.raises(ValueError, match="side=56 is for images"):
        plan_model(library.WhisperConfig(**SPEECH), batch_size=1, side=56)
