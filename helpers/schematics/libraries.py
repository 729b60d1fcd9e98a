"""Schematics of lessons 11 and 12: a training loop in the hands of a library."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.schematics.drawing import Drawing

Line = tuple[str, str]  # text, kind of box


def fabric_loop() -> Drawing:
    """What each line of a loop with Fabric runs, in three precisions."""
    alt = (
        "A table. Left, the lines you write with Fabric: setup, the forward pass, fabric.backward, "
        "fabric.clip_gradients, optimizer.step. Right, what they run in three precisions. "
        "32-true adds nothing, bf16-mixed adds autocast around the forward pass, 16-mixed also "
        "scales the loss and unscales the gradients."
    )
    lines = [
        ("fabric.setup(model, optimizer)\nfabric.setup_dataloaders(loader)", "trained"),
        ("output = model(inputs)", "plain"),
        ("fabric.backward(loss)", "trained"),
        ("fabric.clip_gradients(...)", "trained"),
        ("optimizer.step()", "plain"),
    ]
    same, added = "plain", "trained"
    device = ("model and batches to the device", added)
    forward, autocast = ("forward", same), ("forward under autocast", added)
    backward, clip, step = ("loss.backward()", same), ("clip", same), ("optimizer.step()", same)
    precisions = {
        '"32-true"': [device, forward, backward, clip, step],
        '"bf16-mixed"': [device, autocast, backward, clip, step],
        '"16-mixed"': [
            device,
            autocast,
            ("scaler.scale(loss)\n.backward()", added),
            ("scaler.unscale_(optimizer)\nclip", added),
            ("scaler.step(optimizer)\nscaler.update()", added),
        ],
    }
    drawing = Drawing(110, 44, alt, inches=9.5)
    drawing.text(16, 41.5, "you write", size=10, bold=True)
    for row, (text, kind) in enumerate(lines):
        drawing.box(1, 32.5 - 6.6 * row, 30, 5.6, text, kind, size=8)
    for column, (name, cells) in enumerate(precisions.items()):
        left = 35 + 25 * column
        drawing.text(left + 12, 41.5, name, size=10, bold=True)
        for row, (text, kind) in enumerate(cells):
            drawing.box(left, 32.5 - 6.6 * row, 24, 5.6, text, kind, size=7.5)
    drawing.legend(24, 0.8, {"trained": "changed by you or by Fabric", "plain": "as before"}, 36)
    return drawing


def accelerate_loop() -> Drawing:
    """The plain loop and the loop with Accelerate, line beside line."""
    alt = (
        "A training loop in seven lines, plain on the left and with Accelerate on the right. "
        "Differences: an Accelerator is made, prepare exchanges model, optimizer and loader, "
        "accumulate marks micro-batches, and accelerator.backward replaces loss.backward."
    )
    plain = [
        ("", "plain"),
        ("", "plain"),
        ("for inputs, labels in loader:", "plain"),
        ("", "plain"),
        ("loss = F.cross_entropy(model(inputs), labels)", "plain"),
        ("loss.backward()", "plain"),
        ("optimizer.step(); optimizer.zero_grad()", "plain"),
    ]
    changed = {
        0: "accelerator = Accelerator(...)",
        1: "model, optimizer, loader = accelerator.prepare ...",
        3: "with accelerator.accumulate(model):",
        5: "accelerator.backward(loss)",
    }
    return _loops(alt, "plain PyTorch", "with Accelerate", plain, changed)


def offload() -> Drawing:
    """One GPU and the CPU's memory, without and with ZeRO-Offload."""
    alt = (
        "Left: parameters, gradients, optimizer states and activations are all in GPU memory. "
        "Right, with ZeRO-Offload: optimizer states lie in CPU memory, where the optimizer's step "
        "runs; gradients go down to it and updated parameters come back up."
    )
    drawing = Drawing(100, 46, alt)
    drawing.text(22, 43.5, "everything on the GPU", size=10.5, bold=True)
    drawing.text(73, 43.5, "ZeRO-Offload", size=10.5, bold=True)
    for left in (4, 55):
        drawing.text(left, 39, "GPU memory", align="left", size=8.5)
        drawing.text(left, 14.5, "CPU memory", align="left", size=8.5)
    drawing.row(4, 30, 17.25, 7, ["parameters", "gradients"], ["trained", "gradient"], gap=1)
    drawing.box(4, 21.5, 20, 7, "optimizer states", "state")
    drawing.box(25, 21.5, 14.5, 7, "activations", "kept")
    drawing.box(4, 4, 35.5, 8, "", "dropped")
    drawing.box(55, 21.5, 17.5, 7, "parameters", "trained")
    drawing.box(55, 30, 17.5, 7, "activations", "kept")
    drawing.box(73.5, 30, 22, 7, "free", "dropped")
    drawing.box(55, 4, 40.5, 8, "optimizer states, and the optimizer's step", "state")
    drawing.arrow((90, 29), (90, 12.5), "gradients")
    drawing.arrow((66, 12.5), (66, 21), "updated parameters")
    return drawing


def _loops(
    alt: str, left: str, right: str, plain: Sequence[Line], changed: dict[int, str]
) -> Drawing:
    """Two listings side by side; lines of the right one in `changed` replace the left's."""
    drawing = Drawing(110, 47, alt, inches=9.5)
    drawing.text(26, 44.5, left, size=10.5, bold=True)
    drawing.text(82, 44.5, right, size=10.5, bold=True)
    y = 38.0
    for number, (text, kind) in enumerate(plain):
        if text:
            drawing.box(2, y, 49, 4.6, text, kind, size=8)
        new = changed.get(number)
        if new or text:
            drawing.box(57, y, 51, 4.6, new or text, "trained" if new else kind, size=8)
        y -= 5.4
    drawing.legend(34, 0.6, {"trained": "changed or new", "plain": "as before"}, 24)
    return drawing
