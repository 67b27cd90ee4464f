"""Gradient sync. Modules here are shared by ``ddp``, ``fsdp2`` and ``diloco``, which do not import each other."""
