"""What would fit, and what is fastest, found by planning."""
