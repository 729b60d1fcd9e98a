"""Plans of long texts: each GPU with texts of its own, against several GPUs for a text."""

from __future__ import annotations

from helpers.strategy import long_context
from helpers.tables import Table
from tight_fit.units import size, span


def contexts() -> Table:
    """A row per length and layout of `strategy.long_context`: bytes per GPU, and the step's time.

    Nothing is planned here: the plans are kept with the package.
    """
    rows = []
    for (length, layout), facts in long_context.kept().items():
        sent = facts["sent"].get("context", {})
        published = long_context.PUBLISHED.get((length, layout))
        rows.append(
            {
                "tokens": f"{length:,}",
                "layout": layout,
                "need per GPU": size(facts["need"]),
                "fits": "yes" if facts["fits"] else "no",
                "activations": size(facts["at_peak"].get("activations", 0)),
                "keys and values sent": size(sum(sent.values())) if sent else "nothing",
                "time per step": span(facts["seconds"]),
                "tokens per second": f"{facts['tokens_per_second']:,.0f}",
                "published": f"{published * long_context.CLUSTER.gpus:,}" if published else "",
            }
        )
    return Table(
        rows,
        f"Planned, nothing was run: Llama 3.1 8B on {long_context.CLUSTER}, a text per data rank. "
        "262,144 tokens are twice as many as the model was made for. Published: torchtitan's, with "
        "torch.compile and float8, which the plan leaves out.",
    )
