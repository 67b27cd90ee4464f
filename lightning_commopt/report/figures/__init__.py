"""The charts of a report's page."""
