"""Processes: starting them, and what the environment says of their ranks."""
