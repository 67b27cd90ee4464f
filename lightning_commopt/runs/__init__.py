"""What a run was and came to."""
