"""Detects ranks that wait in vain: while joining, at the end of an epoch, for a rank that has failed, in a hang."""
