"""How long the operations of a step take on a GPU."""
