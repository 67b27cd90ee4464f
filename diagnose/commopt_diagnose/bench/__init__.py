"""commopt bench: collectives and comm hooks, timed by size."""
