"""Kernels in C for CPUs, compiled when the package is installed; torch's remain where they aren't there."""
