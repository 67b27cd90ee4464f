"""commopt nsys: every rank under Nsight Systems."""
