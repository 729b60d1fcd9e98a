"""Optimizers whose states are paged, as programs of QLoRA use them.

Weights in 4 bits are held to the real model's bytes in test_programs.py.
"""

import pytest

from tests.script import run

pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("bits", ("8", "32"))
def test_paged_states_are_counted_on_the_gpu(bits, tmp_path):
    """As the same optimizer's without pages, of which a CPU can make real ones."""
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, torch, bitsandbytes as bnb\n"
        "model = torch.nn.Linear(1024, 1024, bias=False).cuda()\n"
        "optimizer = getattr(bnb.optim, sys.argv[1])(model.parameters())\n"
        "for step in range(5):\n"
        "    model(torch.rand(8, 1024, device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n",
        encoding="utf8",
    )
    paged, plain = (run(str(path), f"{kind}AdamW{bits}bit") for kind in ("Paged", ""))
    assert paged["at_peak"]["optimizer states"] == plain["at_peak"]["optimizer states"] > 2**21
    assert any(note.startswith("Paged optimizer states") for note in paged["notes"])
