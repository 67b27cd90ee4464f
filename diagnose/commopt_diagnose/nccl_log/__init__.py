"""Reads logs of ``NCCL_DEBUG=INFO``: how ranks communicate, and what is wrong or slow."""
