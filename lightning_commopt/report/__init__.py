"""Reports the records of runs in words, tables and charts. Never measures or trains."""
