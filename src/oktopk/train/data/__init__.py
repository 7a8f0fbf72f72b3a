"""Corpora of speech: recordings, lists of them, and where they come from."""
