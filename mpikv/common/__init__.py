"""Checks of arguments, files, processes, the clock, digests."""
