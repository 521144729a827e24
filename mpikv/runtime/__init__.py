"""The MPI library and the process it lives in."""
