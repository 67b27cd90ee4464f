"""Gradient sync of models that FSDP2 shards: the comm objects of their units, and what makes them from a plan."""
