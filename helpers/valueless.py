"""What makes a training step run on tensors that have shapes and no values (`FakeTensorMode`)."""
from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Without this torch would run them on real tensors of the same sizes (it has no other implementation).
IN_PLACE = {torch.ops.aten._fused_sgd_.default, torch.ops.aten._fused_sgd_.tensor_lr}


class Valueless(TorchDispatchMode):
    """For tensors without values: whoever asks for one (`.item()`) is told 1. What depends on it is a rate or a size of
    a step, never a shape. An update in place that torch cannot do without values is left out: it makes nothing new."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        if function in IN_PLACE:
            return None
        return function(*args, **(kwargs or {}))


class Stepping(torch.amp.GradScaler):
    """A scaler that never skips: on tensors without values nobody can ask whether a gradient overflowed."""

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        return optimizer.step(*args, **kwargs)
