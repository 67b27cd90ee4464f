"""Chooses the plan of a fit while it trains."""
