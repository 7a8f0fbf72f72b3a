"""How workers start, and where each of them is."""
