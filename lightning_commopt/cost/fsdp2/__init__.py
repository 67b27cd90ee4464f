"""Predicts steps of models that FSDP2 shards, whose collectives are those of units and not of buckets."""
