"""Callbacks that say before the first step of a Trainer what it will need."""
