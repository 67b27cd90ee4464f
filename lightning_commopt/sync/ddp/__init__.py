"""Gradient sync in DDP: buckets, the hook that drives a compressor, and observers."""
