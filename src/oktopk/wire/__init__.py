"""Entries of a sparse vector, and the bytes they travel as."""
