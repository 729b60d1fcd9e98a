"""The two bundled mini models, pretrained here: `deberta/` and `vit/`, the scripts that make them, and their
cards."""
