"""Layouts of a step over many GPUs: each rank planned, its messages, its time."""
