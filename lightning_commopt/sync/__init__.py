"""Gradient sync: what both strategies share, with DDP's side in ``ddp`` and FSDP2's in ``fsdp2``."""
