"""`mpikv plan`: predicts step times, of an allreduce from counted messages, with servers by simulated links."""
