"""DDP's side of gradient sync: hook, executors, buckets, state, groups."""
