"""Schematics of lesson 04: the bits of four number formats, and one step of training in fp16."""

from __future__ import annotations

from helpers.schematics.drawing import Drawing

# name, bits of the exponent, bits of the mantissa, bits that are stored but not used
FORMATS = (("fp32", 8, 23, 0), ("TF32", 8, 10, 13), ("bf16", 8, 7, 0), ("fp16", 5, 10, 0))
REMARKS = (
    "4 bytes",
    "4 bytes in memory; a matrix product reads these 19 bits",
    "2 bytes: the range of fp32, coarse",
    "2 bytes: a small range, finer",
)


def bit_layouts() -> Drawing:
    """Sign, exponent and mantissa of fp32, TF32, bf16 and fp16, one box per bit."""
    alt = (
        "Four rows of boxes, one per bit. fp32 has 1 sign bit, 8 exponent bits and 23 mantissa "
        "bits. TF32 has 1, 8 and 10; bf16 has 1, 8 and 7; fp16 has 1, 5 and 10."
    )
    drawing = Drawing(100, 47, alt)
    for index, (name, exponent, mantissa, unused) in enumerate(FORMATS):
        y = 37 - 10 * index
        kinds = ["plain"] + ["rank 0"] * exponent + ["rank 2"] * mantissa + ["dropped"] * unused
        drawing.text(2, y + 2.5, name, size=11, align="left", bold=True)
        drawing.row(10, y, 2.6, 5, [""] * len(kinds), kinds)
        remark = f"1 + {exponent} + {mantissa} bits, {REMARKS[index]}"
        drawing.text(10, y + 7, remark, size=9, align="left")
    words = {"plain": "sign", "rank 0": "exponent: range", "rank 2": "mantissa: precision"}
    drawing.legend(10, 0.8, words, 25)
    return drawing


def fp16_step() -> Drawing:
    """The order of one training step in fp16 with loss scaling."""
    alt = (
        "A chain of eight boxes: fp32 weights are cast to fp16, forward and backward pass run in "
        "fp16 on the loss times S, the gradients are divided by S in fp32, clipped, and the "
        "optimizer updates the fp32 weights, or skips the step if a gradient is infinite; at last "
        "S is updated."
    )
    drawing = Drawing(100, 34, alt)
    drawing.box(1, 20, 15, 10, "weights\nfp32", "trained")
    drawing.box(22, 20, 16, 10, "copy of the\nweights, fp16", "kept")
    drawing.box(44, 20, 19, 10, "forward pass,\nloss times S,\nbackward pass", "kept", size=8.5)
    drawing.box(69, 20, 29, 10, "gradients times S", "gradient")
    drawing.box(69, 3, 29, 9, "1. divide by S  (unscale_)", "gradient", size=8.5)
    drawing.box(44, 3, 19, 9, "2. clip", "gradient")
    drawing.box(22, 3, 16, 9, "3. step,\nunless infinite", size=8.5)
    drawing.box(1, 3, 15, 9, "4. update S", size=8.5)
    for left, right in ((16, 22), (38, 44), (63, 69)):
        drawing.arrow((left, 25), (right, 25))
    drawing.arrow((83, 20), (83, 12))
    for left, right in ((69, 63), (44, 38), (22, 16)):
        drawing.arrow((left, 7.5), (right, 7.5))
    drawing.arrow((27, 12), (12, 20), "new weights")
    return drawing
