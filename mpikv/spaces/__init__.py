"""The memory that arrays are in, the host's or a GPU's, and how they are copied, added and updated there."""
