"""The Hydra application ``commopt-train``: composing, sweeps, workloads."""
