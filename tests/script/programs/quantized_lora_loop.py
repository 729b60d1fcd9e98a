"""QLoRA in a loop of one's own, with or without peft's preparation for weights of few bits."""

import argparse

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


def load(name, prepare):
    four = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        name, quantization_config=four, dtype=torch.float16, device_map="auto"
    )
    if prepare:
        model = prepare_model_for_kbit_training(model)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--prepare", action="store_true")
    args = parser.parse_args()
    model = load(args.name, args.prepare).train()
    model.print_trainable_parameters()
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-4)
    scaler = torch.amp.GradScaler(device.type)
    for _ in range(100):
        tokens = torch.randint(0, 1000, (4, 64), device=device)
        with torch.autocast(device.type, torch.float16):
            loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
