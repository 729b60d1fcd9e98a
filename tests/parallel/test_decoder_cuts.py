"""Lesson 16's cuts of a decoder, as the page says them, train as one process does."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.forked import forked, results
from tests.lessons.cells import markdown_of, own_code
from tests.ranks.decoder import MODELS, ROWS, TOKENS
from tight_fit.layouts.layout import parse
from tight_fit.layouts.plan import plan_step
from tight_fit.models.step import ModelStep


def cuts():
    return own_code("16", ("cuts = {f", "def cut_decoder("))


def on_two_ranks(leave_out="", how="foreach"):
    """What each rank found of a Llama and a Qwen3 with 2 layers and 4 heads."""
    arguments = (cuts(), leave_out, how)
    return results(forked("tests/ranks/decoder.py", *arguments, ranks=2))


@pytest.mark.parametrize("how", ["foreach", "fused"])
def test_it_trains_as_one_process_does(how):
    """With the optimizers' default on CUDA, and with the one that is pasted and planned."""
    for told in on_two_ranks(how=how):
        for one in told.values():
            assert one["whole"] == 0  # all parameters are cut, or DTensors at least
            assert max(one["gradients"].values()) < 1e-4
            assert max(one["weights"].values()) < 1e-4
            found, wanted = one["norms"]
            assert found == pytest.approx(wanted, rel=1e-4) and min(wanted) > 0.1  # it did clip


def test_it_sends_what_is_planned():
    """The page's tables are plans of what it pastes: on each rank the same bytes."""
    told, *_ = on_two_ranks(how="fused")
    for name, make in MODELS.items():
        job = ModelStep(make().config, ROWS, TOKENS, weights="fp32")
        planned = plan_step(job, parse("tensor=2"))
        sent = sum(message.bytes for message in planned.sent)
        assert told[name]["sent"] == pytest.approx(sent, rel=0.01)


def test_the_lines_of_the_first_screen_are_complete(tmp_path):
    """Pasted as they are, but for the model's name and the GPUs, they make a right step."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    text = markdown_of("16").split("```python\n")[1].partition("```")[0]
    text = f"{cuts()}\n{text}"
    changes = {'"meta-llama/Llama-3.1-8B"': repr(str(tmp_path)), '"cuda", (8,)': '"cpu", (2,)'}
    changes |= {', torch.autocast("cuda", torch.bfloat16)': ""}  # compared in fp32
    for old, new in (changes | {'to("cuda")': 'to("cpu")', "lr=1e-5": "lr=1e-2"}).items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    for told in results(forked("tests/ranks/first_screen.py", text, tmp_path, ranks=2)):
        assert told["apart"] < 1e-4 < 5e-3 < told["moved"]


def test_norms_that_lie_whole_go_wrong():
    """The comparison sees it, and the page is right to say that Qwen3 needs these cuts."""
    for told in on_two_ranks(leave_out="_norm"):
        assert max(told["llama"]["gradients"].values()) < 1e-4
        wrong = {name for name, share in told["qwen3"]["gradients"].items() if share > 0.1}
        assert len(wrong) == 4
        assert all(name.endswith(("q_norm.weight", "k_norm.weight")) for name in wrong)


def test_beside_fsdp_it_is_clipped_and_saved_whole():
    """As the page says: all parameters lie on one grid, so torch's own function takes them."""
    for told in results(forked("tests/ranks/on_two_meshes.py", cuts(), ranks=4)):
        assert told["meshes"] == 1
        found, wanted = told["norms"]
        assert found == pytest.approx(wanted, rel=1e-4) and wanted > 0.1
        assert told["clipped"] < 1e-4 and all(told["saved"].values()) and len(told["saved"]) > 20
