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

from benchmarks.peaks.point import Point, Setup
from tight_fit.gpus import find

SOURCE = "https://github.com/Lightning-AI/litgpt/blob/main/config_hub/finetune (of 00af8b0d)"
TOKENS, CHUNK = 512, 128  # of a text; of a piece of the logits
PLACES = ("query", "key", "value", "projection", "mlp", "head")  # where LoRA may stand
FEW, ALL = ("query", "value"), PLACES


def setup(name: str, examples: int, accumulation: int, lora: dict[str, Any] | None) -> Setup:
    """The step of a recipe. Raises ModuleNotFoundError without litgpt.

    name  of the model, as litgpt has it
    lora  rank, dropout and places; None trains all weights
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
                    placed = {f"lora_{place}": place in lora["places"] for place in PLACES}
                    more = {"lora_r": lora["rank"], "lora_dropout": lora["dropout"]}
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


def _lora(rank: int, places: tuple[str, ...], dropout: float = 0.05) -> dict[str, Any]:
    return {"rank": rank, "places": places, "dropout": dropout}


# Name, litgpt's name, examples of a micro-batch, GB, LoRA. A step has eight examples or more; two
# of its micro-batches stand for all: the second is computed beside the gradients of the first.
ROWS = (
    ("TinyLlama 1.1B", "tiny-llama-1.1b", 8, 13.50, _lora(32, ALL)),
    ("TinyLlama 1.1B", "tiny-llama-1.1b", 4, 14.10, None),
    ("Llama 3.2 1B", "Llama-3.2-1B", 1, 4.49, _lora(32, FEW)),
    ("Llama 3.2 3B", "Llama-3.2-3B", 1, 9.67, _lora(32, FEW)),
    ("Gemma 2B", "Gemma-2b", 2, 12.62, _lora(8, ALL, 0.1)),
    ("Gemma 2 2B", "Gemma-2-2b", 2, 14.31, _lora(8, ALL, 0.1)),
    ("phi-2", "phi-2", 4, 13.98, _lora(8, ALL)),
    ("Phi-3 mini", "Phi-3-mini-4k-instruct", 4, 19.75, _lora(8, ALL)),
    ("StableLM 3B", "stablelm-base-alpha-3b", 1, 8.58, _lora(32, FEW)),
    ("Falcon 7B", "falcon-7b", 1, 16.69, _lora(32, FEW)),
    ("Mistral 7B", "Mistral-7B-v0.1", 2, 20.66, _lora(32, FEW)),
    ("Llama 3 8B", "Llama-3-8B", 1, 19.73, _lora(32, FEW)),
)
POINTS = tuple(
    Point(
        f"{title}, {'LoRA' if lora else 'all weights'}, litgpt's recipe, {examples} × {TOKENS}",
        SOURCE,
        "",
        find("A10G"),
        setup(name, examples, min(2, 8 // examples), lora),
        allocated=gb * 1e9,
        steps=2,
    )
    for title, name, examples, gb, lora in ROWS
)
