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
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BioGptConfig,
    DistilBertConfig,
    GPTNeoXConfig,
    OPTConfig,
)

from benchmarks.peaks.point import Setup
from tight_fit.techniques import model_changes

MASKED = (BertConfig, DistilBertConfig, AlbertConfig)
CONFIGS = {
    "BERT-base": BertConfig(),
    "DistilBERT": DistilBertConfig(),
    "ALBERT-base": AlbertConfig(
        hidden_size=768, num_attention_heads=12, intermediate_size=3072, hidden_act="gelu_new"
    ),
    "BioGPT": BioGptConfig(),
    "Pythia-410M": GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=2048,
    ),
    "OPT-350M": OPTConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        ffn_dim=4096,
        num_attention_heads=16,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    ),
}


def setup(model: str, examples: int, length: int, attention: str) -> Setup:
    """Forward and backward pass on random tokens without padding.

    model  one of `CONFIGS`
    """
    config = CONFIGS[model]

    def make():
        auto = AutoModelForMaskedLM if isinstance(config, MASKED) else AutoModelForCausalLM
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
