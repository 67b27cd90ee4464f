"""Reads how the GPUs and NICs of a machine are connected, and reports what to expect of that and what is slow."""
