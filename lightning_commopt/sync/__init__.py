"""Gradient sync: what strategies share; ``ddp``, ``fsdp2`` and ``diloco`` do not import each other."""
