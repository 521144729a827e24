"""`mpikv plan`: predicts step times by running the real collectives and servers over simulated links."""
