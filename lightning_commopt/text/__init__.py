"""Numbers, tables, lists and checks of options: what every room writes and reads alike."""
