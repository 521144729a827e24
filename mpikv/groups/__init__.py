"""Collective calls without keys between some ranks, of which a process group of PyTorch is made. NumPy only."""
