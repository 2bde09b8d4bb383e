"""The engine beside other engines for CPUs, on the same weights: see __main__.py."""
