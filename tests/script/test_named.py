"""The answer names the kernels it took: attention by dtype and GPU, the optimizer as it is made."""

import pytest
import torch

from tests.script import LOOP, run
from tight_fit.script import program_report

ATTENTION = (
    "import torch\nimport torch.nn.functional as F\n"
    "p = torch.nn.Linear(64, 192, device='cuda', dtype=torch.DTYPE)\n"
    "optimizer = torch.optim.SGD(p.parameters())\n"
    "for step in range(4):\n"
    "    x = torch.randn(2, 512, 64, device='cuda', dtype=torch.DTYPE)\n"
    "    q, k, v = (t.view(2, 512, 1, 64).transpose(1, 2) for t in p(x).chunk(3, -1))\n"
    "    F.scaled_dot_product_attention(q, k, v).square().mean().backward()\n"
    "    optimizer.step()\n    optimizer.zero_grad()\n"
)
# PyTorch's memory-efficient kernel takes fp16 and fp32 from Volta on, bf16 from Ampere on.
FUSED = {("T4", "float16"): True, ("T4", "bfloat16"): False, ("RTX 3060", "bfloat16"): True}


@pytest.mark.parametrize("gpu, dtype", FUSED)
def test_attention_is_fused_by_dtype_and_gpu(gpu, dtype, program):
    facts = run(program(ATTENTION.replace("DTYPE", dtype)), gpu=gpu)
    assert facts["attention"] == {dtype: FUSED[gpu, dtype]}
    scores = 2 * 512 * 512 * torch.empty(0, dtype=getattr(torch, dtype)).itemsize
    assert (facts["peak"] > 2 * scores) is not FUSED[gpu, dtype]
    words = "fused attention in" if FUSED[gpu, dtype] else "written-out attention in"
    assert words in program_report.verdict(facts)[0]
    said = any("has no fused kernel" in note for note in program_report.notes(facts))
    assert said is not FUSED[gpu, dtype]


@pytest.mark.parametrize(
    "options, way, copies",
    [
        ("", "foreach", 1),
        (", fused=True", "fused", 0),
        (", foreach=False", "a tensor at a time", 0),
    ],
)
def test_the_optimizer_is_named_as_it_is_made(options, way, copies, program):
    """foreach holds one more copy of the parameters in its step than a fused kernel does."""
    text = LOOP.replace("model.parameters()", f"model.parameters(){options}")
    text = text.replace("    optimizer.zero_grad()\n", "").replace(
        "    optimizer.step()\n", "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    facts = run(program(text.replace("256", "2048")))
    assert f"AdamW ({way})" in program_report.verdict(facts)[0]
    weights = 4 * (2048 * 2048 + 2048)
    # Weights, gradients and two states. A tensor at a time there are a root and its quotient.
    one = 8 * 2048 * 2048 if way == "a tensor at a time" else 0
    assert facts["peak"] == pytest.approx((4 + copies) * weights + one, rel=0.02)


def test_what_gets_no_gradient_is_said(program):
    text = LOOP.replace("nn.Linear(256, 256)", "nn.Linear(256, 256, bias=True)")
    text = text.replace("model(torch", "torch.nn.functional.linear(torch").replace(
        "device=device))", "device=device), model.weight)"
    )
    notes = program_report.notes(run(program(text)))
    assert any(note.startswith("1 of the 2 tensors") for note in notes)
    assert not any("no gradient" in note for note in program_report.notes(run(program(LOOP))))
