"""The link model: predicts how long a message takes from measured times."""
