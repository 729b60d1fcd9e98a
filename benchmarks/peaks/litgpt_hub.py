"""LoRA and full fine-tuning at 1 to 8 billion bf16 parameters, as litgpt's own recipes run them.

Lightning-AI/litgpt, config_hub/finetune/README.md (of 00af8b0d, Apache 2.0): an A10G, Alpaca2k,
at most 512 tokens, bf16-true, torch.cuda.max_memory_allocated in GB (10⁹). All its rows of LoRA on
one GPU that were met, and one of full fine-tuning; PyTorch's release is not said.

The step is litgpt's own (litgpt 0.5.3 from PyPI, `pip install --no-deps litgpt`): its models, its
LoRA and its loss in pieces, put together as finetune/lora.py and finetune/full.py do. The recipes
(config_hub/finetune/*/lora.yaml) were seen: rank, dropout, and where LoRA stands. Assumed are that
a micro-batch has its full number of examples of 512 tokens after the first update, as Alpaca2k has
longer texts, which are cut; and that the measured commit kept what 0.5.3 keeps. Lightning's Fabric
gives logits back in fp32.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.peaks.point import Setup

TOKENS, CHUNK = 512, 128  # of a text; of a piece of the logits
PLACES = ("query", "key", "value", "projection", "mlp", "head")  # where LoRA may stand
FEW = ("query", "value")


def setup(name: str, examples: int, accumulation: int, lora: dict[str, Any] | None = None) -> Setup:
    """The step of a recipe. Raises ModuleNotFoundError without litgpt.

    name          of the model, as litgpt has it
    accumulation  a step has eight examples or more; two of its micro-batches stand for all: the
                  second is computed beside the gradients of the first
    lora          rank, dropout (0.05 unless given), and "all" places or a "few"; None trains all
                  weights
    """

    def make():
        if find_spec("litgpt") is None:
            raise ModuleNotFoundError(
                "litgpt is needed to plan its recipes: pip install --no-deps litgpt==0.5.3."
            )
        from litgpt.lora import GPT as LoRAModel
        from litgpt.lora import Config as LoRAConfig
        from litgpt.lora import mark_only_lora_as_trainable
        from litgpt.model import GPT, Config
        from litgpt.utils import chunked_cross_entropy

        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                if lora is None:
                    model = GPT(Config.from_name(name))
                else:
                    places = PLACES if lora["places"] == "all" else FEW
                    placed = {f"lora_{place}": place in places for place in PLACES}
                    more = {"lora_r": lora["rank"], "lora_dropout": lora.get("dropout", 0.05)}
                    config = LoRAConfig.from_name(name, lora_alpha=16, **more, **placed)
                    model = LoRAModel(config)
                    mark_only_lora_as_trainable(model)
                model.max_seq_length = TOKENS
        finally:
            torch.set_default_dtype(previous)
        trained = [value for value in model.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0, betas=(0.9, 0.95))
        model.train()
        data = torch.zeros(examples, TOKENS, dtype=torch.long)

        def step():
            for _ in range(accumulation):
                ids, targets = data.to("cuda"), data.to("cuda")
                if lora is None:  # finetune/full.py takes the loss of whole logits in pieces
                    logits = model(ids).float()[..., :-1, :]
                else:
                    logits = [part.float() for part in model(ids, lm_head_chunk_size=CHUNK)]
                    logits[-1] = logits[-1][..., :-1, :]
                loss = chunked_cross_entropy(logits, targets[..., 1:])
                (loss / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()

        return [model], step

    return make
