"""Measures what a step costs: marks in the hook and in the step, records of them, and statistics of records."""
