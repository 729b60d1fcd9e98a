"""From a trace to bytes over the step: what is alive, and what the allocator reserves."""
