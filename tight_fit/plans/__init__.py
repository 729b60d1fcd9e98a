"""Plans of the step of any model, or of a step of one's own."""
