"""The commands of ``commopt``, one folder each."""
