"""Races between ways to average gradients."""
