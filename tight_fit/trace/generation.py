"""What writing completions keeps on a GPU: the key-value cache, at its longest."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tight_fit.techniques.precision import autocast
from tight_fit.techniques.preferences import not_checkpointed
from tight_fit.trace.storage_trace import ACTIVATIONS
from tight_fit.trace.tracker import Tracker


@torch.no_grad()
def write_completions(model: Any, settings: Any, tracker: Tracker) -> None:
    """Run the two ends of what transformers' `generate` does for all completions of a step.

    Those are the pass over the prompts, and the last token, before which the cache has all others.
    Between them memory only grows by a token's keys and values, which are copied with those that
    are there already. So neither seconds nor FLOPs of this are counted.

    settings  a `ModelStep` with task="grpo"
    Raises ValueError for a model without such a cache.
    """
    inner, rows, tokens = model.model, settings.batch_size, settings.tokens
    device = next(inner.parameters()).device
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
    mask = torch.ones_like(ids)
    prompt = tokens - settings.completion
    few: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(inner.forward).parameters:
        few["logits_to_keep"] = 1
    recorder, tracker.recorder = tracker.recorder, None
    tracker.phase("generation")
    inner.eval()
    try:
        with not_checkpointed(inner), autocast(settings, device):
            _sample(inner(ids[:, :prompt], attention_mask=mask[:, :prompt], **few))
            with tracker.paused():
                cache = inner(ids[:, 1:], attention_mask=mask[:, 1:], **few)
                cache = getattr(cache, "past_key_values", None)
            if cache is None:
                raise ValueError(
                    f"{type(inner).__name__} keeps no keys and values while it writes, and only "
                    "models that do are planned with grpo: choose another model."
                )
            tracker.adopt([vars(layer) for layer in cache.layers], ACTIVATIONS)
            _sample(inner(ids[:, -1:], attention_mask=mask, past_key_values=cache, **few))
    finally:
        inner.train()
        tracker.recorder = recorder
        tracker.storage_trace.flops.pop("generation", None)


def _sample(answer: Any) -> None:
    """Draw a token for each completion as `generate` does, `torch.multinomial` written out."""
    last = answer.logits[:, -1].to(torch.float32, copy=True)
    likely = last.softmax(-1)
    drawn = torch.empty_like(likely).exponential_()
    torch.div(likely, drawn, out=drawn).argmax(-1)
