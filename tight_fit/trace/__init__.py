"""One step on tensors without values, followed storage by storage."""
