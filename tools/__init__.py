"""What `make` calls: notebooks, records, pages, and the pretraining of the small models."""
