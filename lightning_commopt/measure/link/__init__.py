"""The link model: how long a message takes, from what was measured."""
