"""Forward and backward passes of six language models in fp16, from transformers' pages: allocated.

Pages of models in transformers' documentation have tables of training with attention written out
("eager") and by PyTorch's kernel ("sdpa"), with torch.cuda.max_memory_allocated in MB (10⁶): BERT
(A100, PyTorch 2.2.0), DistilBERT, ALBERT and BioGPT (RTX 2060, 2.3.1), Pythia-410M (RTX 3080 Ti,
2.2.1) and OPT-350M (L40S, 2.4.0). All were measured by variants of one script
(https://gist.github.com/fxmarty/7e75cc3942d6974e4849093ebea0a331, seen in part, and its
predecessor, seen whole): weights in fp16, no optimizer, the loss is the sum of the logits, and
gradients are given up before each forward pass. The logits live on until the next ones replace
them: a first version of the set-up had missed that the script keeps them in a variable.

Of each table the first, the middle and the last row that has both figures is taken. Assumed are a
head for masked language modelling for the three encoders, ALBERT's second version, for which that
script was written, and that only one of the two models is in memory at a time. The models are those
of the installed transformers, which has changed since.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from benchmarks.pages import config_of
from benchmarks.peaks.point import Setup
from tight_fit.techniques import model_changes

MASKED = ("bert", "distilbert", "albert")


def setup(model: str, examples: int, length: int, attention: str) -> Setup:
    """Forward and backward pass on random tokens without padding.

    model  of data/models.json
    """
    config = config_of(model)

    def make():
        auto = AutoModelForMaskedLM if config.model_type in MASKED else AutoModelForCausalLM
        with model_changes.quiet():
            made = auto.from_config(config, attn_implementation=attention)
        made = made.half().cuda().train()
        ids = torch.zeros(examples, length, dtype=torch.long, device="cuda")
        mask = torch.ones(examples, length, dtype=torch.long, device="cuda")

        kept = {}

        def step():
            made.zero_grad()
            kept["outputs"] = made(input_ids=ids, attention_mask=mask)
            loss = kept["outputs"].logits.sum()
            loss.backward()

        return [made, ids, mask], step

    return make
