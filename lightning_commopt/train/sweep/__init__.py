"""Runs jobs one after another, each in fresh processes, and collects their records."""
