"""`mpikv launch` starts a job on one machine or many, watches it, and leaves nothing behind; `mpikv submit` queues one.

It writes one `mpirun` line, in which every rank runs below a small process of ours (`rank`) that answers for it: it
passes signals on, sends what the rank prints line by line, reports how it ended, and ends it when the launcher is gone.

    options  of both commands                 job  a launch from its options to its status
    hosts  which machines, with which slots   line  the `mpirun` line, and what ranks get to see
    remote  ssh                               processes  what is left on a host
    watch  the job while it runs              connections  to the processes above the ranks, by the rules of channel
    ranks  where they run, and what is known  output  merged, tagged, coloured
    rank, command  above each rank, started by quick
    submit, batch  a script from its options  scheduler, slurm, sge  who is asked      follow  --wait
"""
