"""Ranks that wait in vain: while they join, at the end of an epoch, for a rank that has failed, in a hang."""
