"""Lightning's side: the strategy for the Trainer."""
