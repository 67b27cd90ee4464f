"""Data parallelism without buckets: parameters that are synchronized one by one."""
