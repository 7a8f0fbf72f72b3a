"""The loops of the CPU kernels: plain Python, which `compiling.py` hands to numba.

Every function of these modules is a loop. Loop variables are unsigned: this spares numba its check
for negative indexes, which would keep the compiler from using vector instructions.
"""
