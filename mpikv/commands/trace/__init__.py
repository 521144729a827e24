"""`mpikv trace`: the timelines of a job's ranks put together into one picture, and into one report."""
