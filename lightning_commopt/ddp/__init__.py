"""DDP's side of gradient sync: its hook, its buckets, its reducer."""
