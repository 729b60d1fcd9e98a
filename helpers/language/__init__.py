"""NF4 weights, targets of adapters and a loss in chunks, for language models on one GPU."""
