"""The view of a run in the terminal."""
