"""Which technique, which layout: plans of many ranks, their time, and the choice between them."""
