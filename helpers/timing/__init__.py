"""How long a training step takes on a GPU, before it runs."""
