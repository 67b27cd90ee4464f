"""Detects ranks that wait for others which will never come: while joining, at the end of an epoch, or in a hang."""
