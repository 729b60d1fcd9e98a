"""QLoRA as programs do it, with peft and transformers: held to the real model's bytes."""

import json

import pytest
import torch

from tests.script import run

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

PREPARED = "from peft import prepare_model_for_kbit_training as k; model = k(model)"
PROGRAM = """\
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
four = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_compute_dtype=torch.float16, bnb_4bit_quant_type="nf4"
)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], quantization_config=four, device_map=DEVICE, dtype=torch.float16
)
PREPARED
lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
"""
TRAINING = """\
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
for step in range(2):
    ids = torch.randint(0, 512, (1, 128), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "tie_word_embeddings": False,
}


def real_bytes(folder, prepared: str) -> int:
    """Bytes of weights and their scales that the same lines make on a CPU, from the disk."""
    import transformers

    config = transformers.LlamaConfig(**{k: v for k, v in LLAMA.items() if k != "model_type"})
    transformers.LlamaForCausalLM(config).to(torch.float16).save_pretrained(folder)
    names = {}
    text = PROGRAM.replace("DEVICE", "'cpu'").replace("PREPARED", prepared)
    exec(text.replace("sys.argv[1]", repr(str(folder))), names)
    tensors = [*names["model"].parameters()]
    for parameter in names["model"].parameters():
        if state := getattr(parameter, "quant_state", None):
            tensors += [one for one in state.as_dict().values() if isinstance(one, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("prepared", ["", PREPARED], ids=["as loaded", "prepared for k bits"])
def test_a_qlora_program_is_planned_with_the_bytes_of_the_real_model(prepared, program, tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    text = PROGRAM.replace("DEVICE", "'auto'").replace("PREPARED", prepared)
    facts = run(program(text + TRAINING), str(folder))
    assert facts["fits"]
    planned = facts["at_peak"]["parameters"]
    assert planned == pytest.approx(real_bytes(tmp_path / "saved", prepared), rel=0.001)


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
