"""Starts processes, and reads from the environment which ranks they are."""
