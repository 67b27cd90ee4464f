"""Finds what may keep ranks on these hosts from training together, before they try."""
