"""Which rank keeps the others waiting, in what, and why. Imports neither torch nor Lightning, but for `rank_side`."""
