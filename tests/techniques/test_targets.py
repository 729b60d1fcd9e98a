"""Which layers adapters stand beside, beside peft's own choice."""

import pytest
import transformers as library

from tests.small import configured
from tight_fit.techniques import model_changes
from tight_fit.techniques.targets import targets_of


def llama():
    return library.LlamaForCausalLM(configured(library.LlamaConfig, 16, 2, 4, 24, 50))


def gpt2():
    return library.GPT2LMHeadModel(
        library.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4)
    )


def adapters(model, targets: str) -> set[str]:
    model_changes.add_lora(model, 2, targets_of(model, targets))
    return {name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name}


@pytest.mark.parametrize("make", [llama, gpt2])
def test_all_linear_is_what_peft_takes(make):
    from peft import LoraConfig, get_peft_model

    mine = adapters(make(), "all-linear")
    peft = get_peft_model(make(), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    theirs = {
        name.partition(".lora_")[0].removeprefix("base_model.model.")
        for name, _ in peft.named_parameters()
        if ".lora_" in name
    }
    assert mine == theirs and len(mine) in (2 * 7, 2 * 4)


def test_query_value_and_names():
    assert {name.rpartition(".")[2] for name in adapters(llama(), "query-value")} == {
        "q_proj",
        "v_proj",
    }
    named = adapters(llama(), "o_proj, mlp.up_proj")
    assert {name.rpartition(".")[2] for name in named} == {"o_proj", "up_proj"} and len(named) == 4


@pytest.mark.parametrize("targets", ["c_attn", "q_proj,k_prj", "proj", "lm_heads,v_proj"])
def test_names_that_match_nothing_or_only_partly_are_refused(targets):
    with pytest.raises(ValueError, match="it has down_proj, gate_proj") as caught:
        targets_of(llama(), targets)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert ("v_proj " not in str(caught.value)) and ("q_proj or" not in str(caught.value))


def test_a_model_without_such_projections_is_refused():
    model = library.ResNetForImageClassification(
        library.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    )
    with pytest.raises(ValueError, match="query and value projections"):
        targets_of(model, "query-value")
