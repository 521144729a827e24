"""A parameter server: a core that knows no input or output, the shards it holds, and the loop that feeds it."""
