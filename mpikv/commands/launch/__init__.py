"""`mpikv launch`: starts a job on one machine or many, watches it, and leaves nothing behind.

It writes one `mpirun` line, in which every rank runs below a small process of ours (`rank`) that answers for it: it
passes signals on, sends what the rank prints line by line, says how it ended, and ends it when the launcher is gone.

    options  what the user typed              hosts, allocation  which machines, how many ranks each may take
    placement  how many of which role where   environment  what ranks get to see       line  the `mpirun` line
    watch  the job while it runs              ranks  what is known of its ranks        output  merged, tagged, coloured
    entrance, channel  between rank and launcher   rank, quick, command, sink  the process above each rank
    processes, sweep  what is left            remote, sync, folder  ssh and rsync
    submit, slurm, sge, batch, scheduler, follow  batch jobs, see submit
"""
