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
    PretrainedConfig,
)

from benchmarks.peaks.point import A100, L40S, RTX_2060, RTX_3080_TI, Point, Setup
from tight_fit.techniques import model_changes

PAGES = "https://huggingface.co/docs/transformers/v4.45.2/model_doc/"
MASKED = (BertConfig, DistilBertConfig, AlbertConfig)


def setup(config: PretrainedConfig, examples: int, length: int, attention: str) -> Setup:
    """Forward and backward pass on random tokens without padding."""

    def make():
        auto = AutoModelForMaskedLM if isinstance(config, MASKED) else AutoModelForCausalLM
        with model_changes.quiet():
            model = auto.from_config(config, attn_implementation=attention)
        model = model.half().cuda().train()
        ids = torch.zeros(examples, length, dtype=torch.long, device="cuda")
        mask = torch.ones(examples, length, dtype=torch.long, device="cuda")

        kept = {}

        def step():
            model.zero_grad()
            kept["outputs"] = model(input_ids=ids, attention_mask=mask)
            loss = kept["outputs"].logits.sum()
            loss.backward()

        return [model, ids, mask], step

    return make


# model, page, release, GPU, configuration, rows (examples, tokens, MB written out, MB by kernel)
TABLES = (
    (
        "BERT-base",
        "bert",
        "2.2.0",
        A100,
        BertConfig(),
        ((4, 256, 939.213, 764.834), (8, 256, 1594.295, 1226.114), (16, 512, 6964.659, 3961.013)),
    ),
    (
        "DistilBERT",
        "distilbert",
        "2.3.1",
        RTX_2060,
        DistilBertConfig(),
        ((1, 128, 397.038, 399.629), (4, 128, 427.491, 425.787), (8, 256, 983.450, 798.480)),
    ),
    (
        "ALBERT-base",
        "albert",
        "2.3.1",
        RTX_2060,
        AlbertConfig(
            hidden_size=768, num_attention_heads=12, intermediate_size=3072, hidden_act="gelu_new"
        ),
        ((2, 256, 358.411, 321.088), (4, 256, 679.534, 602.660), (8, 512, 2820.398, 2219.695)),
    ),
    (
        "BioGPT",
        "biogpt",
        "2.3.1",
        RTX_2060,
        BioGptConfig(),
        ((1, 128, 1601.862, 1601.497), (4, 128, 1671.435, 1672.164), (8, 256, 3989.980, 2986.492)),
    ),
    (
        "Pythia-410M",
        "gpt_neox",
        "2.2.1",
        RTX_3080_TI,
        GPTNeoXConfig(
            vocab_size=50304,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=2048,
        ),
        ((1, 128, 1789.95, 1789.95), (2, 256, 1999.72, 1951.67), (4, 512, 6290.58, 3877.29)),
    ),
    (
        "OPT-350M",
        "opt",
        "2.4.0",
        L40S,
        OPTConfig(
            hidden_size=1024,
            num_hidden_layers=24,
            ffn_dim=4096,
            num_attention_heads=16,
            word_embed_proj_dim=512,
            do_layer_norm_before=False,
        ),
        (
            (1, 128, 1474.611, 1474.32),
            (2, 2048, 30572.058, 4750.55),
            (8, 1024, 34175.763, 8821.18),
        ),
    ),
)
POINTS = tuple(
    Point(
        f"{name}, fp16, {examples} × {length}, {attention}",
        PAGES + page,
        release,
        gpu,
        setup(config, examples, length, attention),
        allocated=megabytes * 1e6,
        steps=2,
    )
    for name, page, release, gpu, config, rows in TABLES
    for examples, length, *figures in rows
    for attention, megabytes in zip(("eager", "sdpa"), figures)
)
