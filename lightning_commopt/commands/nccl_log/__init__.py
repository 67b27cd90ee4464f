"""Reads NCCL_DEBUG=INFO logs: how ranks talk, and what is wrong or slow."""
