# What a batch script does once it has found mpikv: `. job.sh KIND [array]`; KIND: slurm-mpirun, slurm-srun or
# sge-mpirun. The settings at the script's top are variables here, as is ASKED, in which its traps keep a signal.
#
# This shell only listens. All that takes long is done by a child, which ignores the signals and becomes the launcher in
# the end: so what is to be signalled is there from the beginning, and no signal can end it before it listens.
KIND=$1
PARTS=$TEMPLATES/parts
say() { printf 'mpikv: %s\n' "$*"; }
is_number() { case $1 in "" | *[!0-9]*) return 1 ;; esac; }
shopt -s nullglob
WORK='' SCRATCH='' LAST=() # folders to remove; a command that ends this shell
trap 'end $?; rm -rf "$WORK" "$SCRATCH"; "${LAST[@]}"' EXIT
[ "$2" != array ] || . "$PARTS/array.sh"
. "$PARTS/${KIND%-*}.sh"
. "$PARTS/environment.sh"
. "$PARTS/watch.sh"
