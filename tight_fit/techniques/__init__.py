"""What a step may do to save memory or time, and the step itself."""
