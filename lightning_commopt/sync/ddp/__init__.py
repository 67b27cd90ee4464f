"""Gradient sync in DDP: its buckets, the hook that drives a compressor, and what is observed."""
