"""`mpikv plan`: predicts step times from counted messages and one cost model (`costs.py`)."""
