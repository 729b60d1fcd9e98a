"""Techniques of a training step beyond its model: what is moved, forgotten early, or rounded."""
