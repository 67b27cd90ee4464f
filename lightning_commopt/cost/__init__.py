"""Predicts the time of a step under any plan, from the records of one run."""
