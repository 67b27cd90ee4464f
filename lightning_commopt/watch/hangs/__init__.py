"""Finds out which rank keeps the others waiting, in what, and why. Only `rank_side` imports torch or Lightning."""
