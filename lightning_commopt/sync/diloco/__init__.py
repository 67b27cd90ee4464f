"""DiLoCo, training with rare exchanges: fragments, the outer optimizer, and the exchange of workers' changes."""
