"""The three bundled mini models, `deberta/`, `vit/` and `decoder/`, each with its model card."""
