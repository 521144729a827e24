# Lines of this script begin with "mpikv:", all others come from the ranks.
JOB=''
say() { printf 'mpikv: %s\n' "$*"; }
quoted() { # the words as one could type them
    local text
    text=$(printf '%q ' "$@")
    printf '%s' "${text% }"
}
fail() {
    say "error: $*" >&2
    [ -z "$JOB" ] || say "job $JOB ends with status 2"
    exit 2
}
SCRATCH='' MARKS='' CLOCK=''
cleanup() {
    [ -z "$CLOCK" ] || kill "$CLOCK" 2>/dev/null
    [ -z "$SCRATCH" ] || rm -rf "$SCRATCH"
    [ -z "$MARKS" ] || rm -rf "$MARKS"
}
trap cleanup EXIT
is_number() { case $1 in "" | *[!0-9]*) return 1 ;; esac; }
