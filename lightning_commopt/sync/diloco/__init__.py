"""Training with few exchanges: fragments, the outer optimizer, and the exchange of what workers have changed."""
