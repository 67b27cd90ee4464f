"""Collectives over a process group, and gathering objects on one rank."""
