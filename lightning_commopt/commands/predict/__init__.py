"""commopt predict: step times under other plans, and on other machines."""
