"""Sizes that a configuration may name: what is far above or below every published model is refused.

A configuration is somebody's file. A model of -1 layers would get a confident plan of nothing, and
one of 10^9 layers would be made layer by layer until the memory of this machine ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Bounds(NamedTuple):
    """The least and the most that a size may be, both included."""

    least: int
    most: int


# By the names that configurations use. The largest published models have 160 layers, a hidden size
# of 25,600 and 262,144 words.
LAYERS, WIDTH, WORDS = Bounds(1, 400), Bounds(1, 1_000_000), Bounds(1, 10_000_000)
HEAD, POSITIONS = Bounds(1, 100_000), Bounds(1, 1_000_000_000)
NO_END = -1  # of positions, in models that take texts of any length
CLASSES, PIXELS = Bounds(1, 1_000_000), Bounds(1, 20_000)
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "intermediate_size"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "d_ff"), WIDTH),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), HEAD),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), POSITIONS),
    "vocab_size": WORDS,
    "type_vocab_size": Bounds(0, WORDS.most),
    "relative_attention_num_buckets": WIDTH,
    "relative_attention_max_distance": Bounds(2, POSITIONS.most),
    "num_labels": CLASSES,
    "num_channels": WIDTH,
    "image_size": PIXELS,
    "patch_size": PIXELS,
}


def check_values(values: dict[str, Any]) -> None:
    """Raises ValueError for sizes of a config.json that transformers would count up to.

    It makes a name for each label and a kind for each layer as it reads them.
    """
    parts = [part for part in values.values() if isinstance(part, dict)]
    for part in (values, *parts):
        for name, bounds in SIZES.items():
            size = part.get(name)
            if isinstance(size, int) and size > bounds.most:
                _check(f"{name} of the configuration", size, bounds)


def check_sizes(config: Any, classes: int | None = None) -> None:
    """Raises ValueError where a size of the configuration, or of a part of it, is out of bounds.

    classes  of a classifier, in place of the configuration's `num_labels`
    """
    if classes is not None:
        _check("classes", classes, CLASSES)
    kept = [_field(config, name) for name in ("text_config", "vision_config")]
    for part in (config, *(part for part in kept if part is not None)):
        for name, bounds in SIZES.items():
            value = _field(part, name)
            for size in value if isinstance(value, (list, tuple)) else (value,):
                if size is not None and (bounds, size) != (POSITIONS, NO_END):
                    _check(f"{name} of the configuration", size, bounds)


def _field(config: Any, name: str) -> Any:
    """A field of a configuration; None where it has none, or another one in each layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers has an exception of its own for fields that vary
        return None


def _check(name: str, value: Any, bounds: Bounds) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, (dict, float)):  # some image sizes are dicts, some widths computed
            return
        raise ValueError(f"{name} is {str(value)[:40]!r}, and must be a whole number.")
    if not bounds.least <= value <= bounds.most:
        text = str(value) if abs(value) < 10**20 else f"a number of {value.bit_length()} bits"
        raise ValueError(
            f"{name} is {text}, and must be from {bounds.least:,} to {bounds.most:,}: "
            "correct it, or give the configuration of a model that exists."
        )
