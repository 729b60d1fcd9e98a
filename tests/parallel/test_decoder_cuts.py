"""Lesson 16's cuts of a decoder, as the page says them, train as one process does."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.forked import forked, results
from tests.lessons.cells import markdown_of, the_cell

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "tensor_parallel.py"


def on_two_ranks(leave_out="", foreach=0):
    """What each rank found of a Llama and a Qwen3 with 2 layers and 4 heads."""
    cell = the_cell("16", "def cut_decoder(")
    arguments = (cell, SCRIPT, leave_out, foreach)
    return results(forked("tests/ranks/decoder.py", *arguments, ranks=2))


@pytest.mark.parametrize("foreach", [0, 1])
def test_it_trains_as_one_process_does(foreach):
    """Also with foreach=True, which is the optimizers' default on CUDA."""
    for told in on_two_ranks(foreach=foreach):
        assert {name: one["cut"] for name, one in told.items()} == {"llama": 14, "qwen3": 18}
        for one in told.values():
            assert max(one["gradients"].values()) < 1e-4
            assert max(one["weights"].values()) < 1e-4
            found, wanted = one["norms"]
            assert found == pytest.approx(wanted, rel=1e-4) and min(wanted) > 0.1  # it did clip


def test_the_lines_of_the_first_screen_are_complete(tmp_path):
    """Pasted as they are, but for the model's name and the GPUs, they make a right step."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    text = markdown_of("16").split("```python\n")[1].partition("```")[0]
    changes = {'"meta-llama/Llama-3.1-8B"': repr(str(tmp_path)), '"cuda", (8,)': '"cpu", (2,)'}
    for old, new in (changes | {'model.to("cuda")': "", "lr=1e-5": "lr=1e-2"}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    for told in results(forked("tests/ranks/first_screen.py", text, tmp_path, ranks=2)):
        assert told["cut"] == 14 and told["whole"] == 7  # two of a layer, the last norm, both ends
        assert told["apart"] < 1e-4 < 5e-3 < told["moved"]


def test_norms_that_lie_whole_go_wrong():
    """The comparison sees it, and the page is right to say that Qwen3 needs these cuts."""
    for told in on_two_ranks(leave_out="_norm"):
        assert max(told["llama"]["gradients"].values()) < 1e-4
        wrong = {name for name, share in told["qwen3"]["gradients"].items() if share > 0.1}
        assert len(wrong) == 4 and all(
            name.endswith(("q_norm.weight", "k_norm.weight")) for name in wrong
        )


def test_beside_fsdp_it_is_clipped_by_mesh_and_saved_whole():
    """As the page says: a group for each mesh, as torch's own function refuses both at once."""
    cell = the_cell("16", "def cut_decoder(")
    for told in results(forked("tests/ranks/on_two_meshes.py", cell, ranks=4)):
        assert told["groups"] == 2 and "must have the same mesh" in told["at once"]
        found, wanted = told["norms"]
        assert found == pytest.approx(wanted, rel=1e-4) and wanted > 0.1
        assert told["clipped"] < 1e-4 and all(told["saved"].values()) and len(told["saved"]) > 20
