"""The MPI library, and the process that has loaded it."""
