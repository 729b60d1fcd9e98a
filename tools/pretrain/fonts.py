"""Digits drawn from the fonts that matplotlib ships: labelled images, none of them handwritten.

The fonts are Computer Modern, DejaVu and STIX, all free. Only images are used, and none is kept.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIZE = 16  # pixels per side
CANVAS = 64  # drawn large, then shrunk
# Fonts without digits, or with symbols in their place.
SKIP = ("LastResort", "Siz", "NonUni", "cmex", "cmsy", "Display")


def names() -> list[Path]:
    """The font files that hold the ten digits, in a fixed order."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return sorted(
        path for path in folder.glob("*.ttf") if not any(word in path.name for word in SKIP)
    )


def draw(digit: int, font: ImageFont.FreeTypeFont, generator: np.random.Generator) -> np.ndarray:
    """One digit, white on black, as (SIZE, SIZE) uint8.

    Slant, rotation, size, position, pen width, blur and noise are random.
    """
    image = Image.new("L", (CANVAS, CANVAS))
    pen = int(generator.integers(0, 3))
    middle = CANVAS / 2, CANVAS / 2
    ImageDraw.Draw(image).text(middle, str(digit), 255, font, anchor="mm", stroke_width=pen)
    image = image.crop(image.getbbox())
    across, down = SIZE * generator.uniform(0.45, 0.95), SIZE * generator.uniform(0.85, 1.05)
    turn, slant = generator.uniform(-0.25, 0.25), generator.uniform(-0.4, 0.4)
    # Where a pixel of the small image comes from in the large one, around both centres.
    back = np.array([[image.width / across, 0], [0, image.height / down]]) @ [
        [1, slant],
        [0, 1],
    ]
    back = back @ [[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]]
    shifted = np.full(2, SIZE / 2) + generator.uniform(-1, 1, 2)
    centre = np.array([image.width, image.height]) / 2 - back @ shifted
    smooth = image.filter(
        ImageFilter.GaussianBlur(generator.uniform(0.4, 1.1) * max(image.size) / SIZE)
    )
    data = (back[0, 0], back[0, 1], centre[0], back[1, 0], back[1, 1], centre[1])
    small = smooth.transform((SIZE, SIZE), Image.Transform.AFFINE, data, Image.Resampling.BILINEAR)
    pixels = np.asarray(small, dtype=np.float32)
    pixels = pixels / max(pixels.max(), 1.0) * generator.uniform(0.8, 1.0) + generator.normal(
        0, 0.02, pixels.shape
    )
    return (pixels.clip(0, 1) * 255).astype(np.uint8)


def sample(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(count, SIZE, SIZE) uint8 images and (count,) int64 digits; the same for the same seed."""
    generator = np.random.default_rng(seed)
    fonts = [ImageFont.truetype(path, CANVAS * 5 // 8) for path in names()]
    digits = generator.integers(0, 10, count)
    images = [
        draw(int(digit), fonts[generator.integers(len(fonts))], generator) for digit in digits
    ]
    return np.stack(images), digits
