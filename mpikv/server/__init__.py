"""A parameter server: a core without input or output, the shards that it owns, and the loop that runs the core."""
