"""Tasks that learn from what is preferred or rewarded, and how their reference is had.

Nothing here imports PyTorch; `techniques.preferences` has the losses.
"""

from __future__ import annotations

TASKS = ("dpo", "grpo")
# How the reference is had: a frozen copy in memory, the base under adapters that are switched off,
# its log-probabilities computed once before the training, or not at all.
MODEL, ADAPTERS_OFF, PRECOMPUTED, NONE = "model", "adapters-off", "precomputed", "none"
REFERENCES = (MODEL, ADAPTERS_OFF, PRECOMPUTED, NONE)
OF_TASK = {"dpo": REFERENCES[:3], "grpo": (NONE, *REFERENCES[:2])}
