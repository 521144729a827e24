ASKED=''; trap 'ASKED=${ASKED:-USR1}' USR1; trap 'ASKED=USR2' USR2; trap 'ASKED=TERM' TERM  # kept, for the ranks, from here on
