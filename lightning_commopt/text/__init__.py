"""Numbers, tables, lists, findings and checks of options, for all packages."""
