"""What ranks get to see: `--env`, and what always goes with it.

Values travel in one variable of `mpirun`'s own environment, so none of them shows in a list of processes, and the MPI's
daemons do not see them. On other hosts ranks start with what a remote shell gives them: what a training program needs
of this environment goes along without being asked for. MXNet's `NAME:VALUE` is understood beside `NAME=VALUE`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mpikv.errors import ConfigError

# Where programs and libraries are, how numerical libraries compute (the bits depend on it), and settings of MPI.
ALWAYS = re.compile(
    r"PATH|LD_LIBRARY_PATH|PYTHONPATH|VIRTUAL_ENV|PYTHONUNBUFFERED|PYTHONDONTWRITEBYTECODE"
    r"|(OMP|OPENBLAS|MKL|BLIS|KMP|NUMEXPR|NPY)_\w+"
    r"|MPIKV_\w+|MPI4PY_\w+|OMPI_(MCA_\w+|ALLOW_RUN_AS_ROOT\w*)|MPIR_CVAR_\w+|I_MPI_\w+|UCX_\w+|FI_\w+|NCCL_\w+"
)
PAIR = re.compile(r"(?P<name>[A-Za-z_]\w*)(?:(?P<sign>[=:])(?P<value>.*))?", re.DOTALL)


def read_pairs(option: str, texts: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of `NAME` and `NAME=VALUE` texts; NAME alone has its value in `environ`. Raises ConfigError."""
    found = {}
    for text in texts:
        pair = PAIR.fullmatch(text)
        if pair is None:
            shown = re.split("[=:]", text, maxsplit=1)[0]  # without the value, which may be a secret
            raise ConfigError(f"{option} {shown}: it is NAME=VALUE, or NAME for a variable of this environment")
        name = pair["name"]
        if pair["sign"] is None and name not in environ:
            raise ConfigError(f"{option} {name}: no such variable is set here; give {option} {name}=VALUE")
        found[name] = environ[name] if pair["sign"] is None else pair["value"]
    return found


def always(environ: Mapping[str, str]) -> dict[str, str]:
    """What of this environment goes to every rank on another host."""
    return {name: value for name, value in environ.items() if ALWAYS.fullmatch(name)}
