"""The command ``commopt tune``."""
