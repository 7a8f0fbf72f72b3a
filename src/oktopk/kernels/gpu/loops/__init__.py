"""Triton kernels. Functions with an underscore are parts of kernels.

A kernel that works on rows has a grid of blocks and rows. Each row has a state of FIELDS numbers on
the device; see `names.py`.
"""
