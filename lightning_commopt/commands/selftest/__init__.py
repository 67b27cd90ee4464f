"""Checks of gradient sync on the devices of this machine."""
