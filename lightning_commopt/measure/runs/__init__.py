"""The record of a run: its settings and results."""
