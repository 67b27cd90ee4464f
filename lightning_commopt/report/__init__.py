"""Reads the records of runs and says what came out: in words, tables and charts. Never measures, never trains."""
