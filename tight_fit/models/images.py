"""What models that read images beside text are given: pixels, and their places in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SIDE = 448  # pixels, of models that read images of any size
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # read the patches of images of any size
# These read images of one size, [images, channels, height, width].
PLAIN = ("llava", "internvl", "gemma3", "paligemma", "mistral3")
TYPED = ("gemma3", "paligemma")  # want to know which tokens are the image's
SIZED = ("mistral3",)  # want the size of each image
READ = GRIDS + PLAIN


def side_of(config: Any, side: int | None) -> int:
    """Height and width of an image in pixels: `side`, else the configuration's."""
    size = side or getattr(config.vision_config, "image_size", None) or SIDE
    return size[0] if isinstance(size, (tuple, list)) else size


def shape_of(config: Any, side: int | None) -> tuple[int, int, int]:
    """(channels, height, width) of an image."""
    vision, pixels = config.vision_config, side_of(config, side)
    channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", None)
    return channels or 3, pixels, pixels


def tokens_of(config: Any, side: int | None) -> int:
    """Tokens of the text that one image stands for.

    Raises ValueError for a side that is no multiple of what becomes one token.
    """
    if config.model_type == "gemma3":
        return config.mm_tokens_per_image
    cells = side_of(config, side) // _pixels(config)
    if side_of(config, side) % _pixels(config):
        raise ValueError(
            f"side={side_of(config, side)} is no multiple of the {_pixels(config)} pixels that "
            f"become one token of {config.model_type}: use {_pixels(config) * max(cells, 1)}."
        )
    whole = config.model_type == "llava" and config.vision_feature_select_strategy == "full"
    return cells**2 + whole


def _patch(config: Any) -> int:
    patch = config.vision_config.patch_size
    return patch[0] if isinstance(patch, (tuple, list)) else patch


def _pixels(config: Any) -> int:
    """Pixels of a side that become one token."""
    if config.model_type in GRIDS:
        return _patch(config) * config.vision_config.spatial_merge_size
    if config.model_type == "mistral3":
        return _patch(config) * config.spatial_merge_size
    if config.model_type == "internvl":
        return round(_patch(config) / config.downsample_ratio)
    return _patch(config)


def inputs(
    config: Any, examples: int, tokens: int, side: int | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A micro-batch of examples of one image each, before the rest of the text.

    input_ids, attention_mask and, where the model wants it, the kind of each token are int64
    [examples, tokens]. Pixels are [examples, channels, side, side], or of models in `GRIDS`
    [examples x patches, numbers of a patch], beside image_grid_thw, int64 [examples, 3].
    """
    import torch

    count, pixels = tokens_of(config, side), side_of(config, side)
    image = getattr(config, "image_token_id", None) or config.image_token_index
    special = {number for name, number in vars(config).items() if name.endswith(("_id", "_index"))}
    plain = next(number for number in range(1 << 20) if number not in special)
    row = [image] * count + [plain] * (tokens - count)
    kinds = [1] * count + [0] * (tokens - count)
    found = {
        "input_ids": torch.tensor([row] * examples),
        "attention_mask": torch.ones(examples, tokens, dtype=torch.int64),
    }
    vision, shape = config.vision_config, shape_of(config, side)
    if config.model_type in GRIDS:
        along = pixels // vision.patch_size
        numbers = shape[0] * vision.temporal_patch_size * vision.patch_size**2
        found["pixel_values"] = torch.randn(examples * along**2, numbers, dtype=dtype)
        found["image_grid_thw"] = torch.tensor([[1, along, along]] * examples)
        found["mm_token_type_ids"] = torch.tensor([kinds] * examples)
        return found
    found["pixel_values"] = torch.randn(examples, *shape, dtype=dtype)
    if config.model_type in TYPED:
        found["token_type_ids"] = torch.tensor([kinds] * examples)
    if config.model_type in SIZED:
        found["image_sizes"] = torch.tensor([[pixels, pixels]] * examples)
    return found
