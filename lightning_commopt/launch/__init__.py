"""Processes: starting them, and what the environment has of their ranks."""
