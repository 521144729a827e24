"""The benchmark: `mpikv bench`, the store beside raw MPI, Gloo and the machine's limit, in one run."""
