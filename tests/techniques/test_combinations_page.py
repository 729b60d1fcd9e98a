"""Every row of docs/combinations.md: what goes together, and which names hold."""

import importlib
import re
from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
    TrainingArguments,
)

from tests.forked import forked, results
from tests.small import configured
from tight_fit.models.step import ModelStep
from tight_fit.plans.compiled import plan_compiled
from tools.course import NOTEBOOKS

PAGE = (NOTEBOOKS.parent / "docs" / "combinations.md").read_text(encoding="utf8")
small = partial(configured, Qwen3Config, 64, 2, 4, 128, 64, num_key_value_heads=2, head_dim=16)
IDS = torch.arange(18).view(2, 9)


def made():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(small())


def adapted(model):
    """With adapters whose two matrices are both random, so that both get a gradient."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    lora = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def gradients(model):
    model.train()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}


def compiled(model):
    """Compile each layer; the list of graphs that are made."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend)
    return graphs


def recomputed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def equal(found, wanted):
    assert found.keys() == wanted.keys() and None not in found.values()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_lora_beside_checkpointing_in_either_order():
    wanted = gradients(adapted(made()))
    equal(gradients(recomputed(adapted(made()))), wanted)
    equal(gradients(adapted(recomputed(made()))), wanted)


def test_adapters_of_a_bf16_base_are_fp32_and_new_modules_are_not():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(made().bfloat16(), lora)
    trained = {n: p.dtype for n, p in model.named_parameters() if p.requires_grad}
    assert {kind for n, kind in trained.items() if "lora_" in n} == {torch.float32}
    assert {kind for n, kind in trained.items() if "lora_" not in n} == {torch.bfloat16}


def test_the_reentrant_kind_gives_adapters_behind_frozen_embeddings_no_gradient():
    model = adapted(made())
    inner = model.get_base_model().model
    layer = inner.layers[0]
    given = {"position_embeddings": inner.rotary_emb(torch.ones(1), torch.arange(9)[None])}
    states = inner.embed_tokens(IDS)
    for asks in (False, True):
        if asks:
            states = states.detach().requires_grad_()  # as enable_input_require_grads does
        out = torch.utils.checkpoint.checkpoint(
            lambda states: layer(states, **given), states, use_reentrant=True
        )
        assert out.requires_grad == asks


def test_with_a_cache_of_keys_no_two_compiled_layers_share_a_graph():
    assert "| compile + the cache of keys | **no** |" in PAGE
    model = made().train()
    for cache, layers in ((True, 2), (False, 1)):
        graphs = compiled(model)
        model(input_ids=IDS, labels=IDS, use_cache=cache).loss.backward()
        assert len(graphs) == layers


def test_checkpointing_and_compile_and_adapters():
    wanted = gradients(made())
    model = recomputed(made())
    graphs = compiled(model)
    equal(gradients(model), wanted)
    assert len(graphs) == 1  # equal layers share it
    model = adapted(made())
    graphs = compiled(model.get_base_model())
    equal(gradients(model), gradients(adapted(made())))
    assert graphs


def test_beside_ddp_and_fsdp(tmp_path):
    """On two ranks; gradients are those of one process."""
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for told in results(forked("tests/ranks/combined.py", tmp_path, block, ranks=2)):
        refused = told.pop("8-bit AdamW, FSDP")
        assert re.search(r"got mixed torch.Tensor and DTensor", refused)
        assert "got mixed torch.Tensor and DTensor" in PAGE
        assert told.pop("graphs") == 1
        assert {told.pop("LoRA, part"), told.pop("QLoRA, part")} == {0.5}
        assert told == dict.fromkeys(told, True) and len(told) == 6


def test_a_budget_halves_what_is_kept():
    named = re.search(r"torch\.(_functorch)\.config\.(\w+) = ([\d.]+)", PAGE)
    step = ModelStep(small(), batch_size=4, length=24)
    kept = plan_compiled(step).compiled
    config = importlib.import_module(f"torch.{named[1]}.config")
    with config.patch({named[2]: float(named[3])}):
        assert plan_compiled(step).compiled == pytest.approx(kept / 2, rel=0.1)


OLD = {"evaluation_strategy": "no", "group_by_length": True, "warmup_ratio": 0.03, "no_cuda": True}


@pytest.mark.parametrize("name", OLD)
def test_old_names_are_refused(name, tmp_path):
    assert re.search(rf"`{name}[=`].*\| TypeError \|", PAGE)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        TrainingArguments(str(tmp_path), **{name: OLD[name]})


@pytest.mark.skipif(not hasattr(Qwen3ForCausalLM, "activation_checkpointing_enable"), reason="5.23")
def test_todays_names_hold(tmp_path):
    arguments = TrainingArguments(
        str(tmp_path), eval_strategy="no", train_sampling_strategy="group_by_length",
        warmup_steps=0.03, use_cpu=True, report_to=[],
    )  # fmt: skip
    assert arguments.get_warmup_steps(100) == 3
    assert arguments.optim == "adamw_torch_fused"
    with pytest.raises(TypeError, match="'tokenizer'"):
        Trainer(made(), arguments, tokenizer=None)
    Trainer(made(), arguments, processing_class=None)
    made().save_pretrained(tmp_path / "model")
    load = AutoModelForCausalLM.from_pretrained
    for name in ("dtype", "torch_dtype"):
        assert load(tmp_path / "model", **{name: torch.bfloat16}).dtype is torch.bfloat16
    with pytest.raises(TypeError, match="load_in_4bit"):
        load(tmp_path / "model", load_in_4bit=True)
    with pytest.warns(FutureWarning, match="activation_checkpointing_enable"):
        made().gradient_checkpointing_enable()
    with pytest.warns(FutureWarning, match="Use `activation_checkpointing` instead"):
        TrainingArguments(str(tmp_path), use_cpu=True, gradient_checkpointing=True)
    with pytest.warns(FutureWarning, match=r"torch.amp.GradScaler\('cuda'"):
        torch.cuda.amp.GradScaler()
