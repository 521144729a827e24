"""Collectives without keys over some ranks: what a process group of PyTorch is made of. NumPy only."""
