"""Memory that the ranks of one host share, and how they allocate, count, wait and add there."""
