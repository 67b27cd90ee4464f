"""Small models and data to train with communication plans; import each from its own module."""
