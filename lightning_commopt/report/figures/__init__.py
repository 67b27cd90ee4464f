"""The charts of a report's page, one question a file."""
