"""What connects the GPUs and NICs of a machine, what to expect of it, and what hurts."""
