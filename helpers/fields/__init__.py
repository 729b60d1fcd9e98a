"""What the fields of a step mean together, and what of it is refused."""
