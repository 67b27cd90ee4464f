"""Gradient sync of models that FSDP2 shards: the comm objects of their units, and how a plan sets them up."""
