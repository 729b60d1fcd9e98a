"""Plans beside published and own measurements; sweeps of accuracy."""
