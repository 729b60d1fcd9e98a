"""The two bundled mini models, `deberta/` and `vit/`, each with its model card."""
