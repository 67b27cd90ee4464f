"""What ``commopt bench`` measures: how long collectives and comm hooks take, by size, on the links that are there."""
