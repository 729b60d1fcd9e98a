"""Lesson 16's cuts of a decoder, as the page says them, train as one process does."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.forked import forked, results
from tests.lessons.cells import markdown_of, own_code
from tests.ranks.decoder import MODELS, ROWS, TOKENS
from tests.ranks.tiny import SIZES
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep


def cuts():
    return own_code("16", ("cuts = {f", "def cut_decoder("))


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_it_trains_as_one_process_does(how):
    """With the optimizers' default on CUDA, and with the one that is pasted and planned, where each
    rank sends the bytes of the page's tables."""
    found = results(forked("tests/ranks/decoder.py", cuts(), "", how, ranks=2))
    for told in found:
        for one in told.values():
            assert one["whole"] == 0  # all parameters are cut, or DTensors at least
            assert max(one["gradients"].values()) < 1e-4
            assert max(one["weights"].values()) < 1e-4
            clipped, wanted = one["norms"]
            assert clipped == pytest.approx(wanted, rel=1e-4) and min(wanted) > 0.1  # it did clip
    if how == "fused":
        for name, make in MODELS.items():
            planned = plan_step(
                ModelStep(make().config, ROWS, TOKENS, weights="fp32"), parse("tensor=2")
            )
            sent = sum(message.bytes for message in planned.sent)
            assert found[0][name]["sent"] == pytest.approx(sent, rel=0.01)


def test_norms_that_lie_whole_go_wrong():
    """The comparison sees it, and the page is right to say that Qwen3 needs these cuts."""
    for told in results(forked("tests/ranks/decoder.py", cuts(), "_norm", "fused", ranks=2)):
        assert max(told["llama"]["gradients"].values()) < 1e-4
        wrong = {name for name, share in told["qwen3"]["gradients"].items() if share > 0.1}
        assert len(wrong) == 4
        assert all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in wrong)


def test_the_lines_of_the_first_screen_are_complete(tmp_path):
    """Pasted as they are, but for the model's name and the GPUs, they make a right step."""
    LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4)).save_pretrained(tmp_path)
    text = markdown_of("16").split("```python\n")[1].partition("```")[0]
    text = f"{cuts()}\n{text}"
    changes = {'"meta-llama/Llama-3.1-8B"': repr(str(tmp_path)), '"cuda", (8,)': '"cpu", (2,)'}
    changes |= {', torch.autocast("cuda", torch.bfloat16)': ""}  # compared in fp32
    for old, new in (changes | {'to("cuda")': 'to("cpu")', "lr=1e-5": "lr=1e-2"}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    for told in results(forked("tests/ranks/first_screen.py", text, tmp_path, ranks=2)):
        assert told["apart"] < 1e-4 < 5e-3 < told["moved"]


def test_beside_fsdp_it_is_clipped_and_saved_whole():
    """As the page says: all parameters lie on one grid, so torch's own function takes them."""
    for told in results(forked("tests/ranks/on_two_meshes.py", cuts(), ranks=4)):
        assert told["meshes"] == 1
        found, wanted = told["norms"]
        assert found == pytest.approx(wanted, rel=1e-4) and wanted > 0.1
        assert told["clipped"] < 1e-4 and all(told["saved"].values()) and len(told["saved"]) > 20
