"""Downloaded files: what the course reads, whether a copy is here and whole, how long to wait."""
