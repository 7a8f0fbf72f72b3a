"""Simulation: the real code of all ranks in one process, on links that nobody owns."""
