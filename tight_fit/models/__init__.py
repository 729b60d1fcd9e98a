"""Models by name: where a configuration is found, which class trains it, its step."""
