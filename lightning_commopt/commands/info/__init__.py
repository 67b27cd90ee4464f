"""commopt info: versions, devices, backends and options."""
