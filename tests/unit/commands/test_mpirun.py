"""Finding `mpirun` and telling its family."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from mpikv.commands.mpirun import INTEL, MPICH, OPEN_MPI_4, OPEN_MPI_5, Mpirun, family_of, find_mpirun, identify
from mpikv.errors import ConfigError

HYDRA = "HYDRA build details:\n    Version:                                 5.0.2\n    Process Manager: pmi\n"


def program(folder: Path, text: str, name: str = "mpirun") -> str:
    path = folder / name
    path.write_text(f"#!{shutil.which('sh')}\necho '{text}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", OPEN_MPI_5, "5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n", OPEN_MPI_4, "4.1.4"),
        ("mpirun (OpenRTE) 3.1.0rc2\n", OPEN_MPI_4, "3.1.0rc2"),
        ("prterun (PRRTE) 3.0.12\n", OPEN_MPI_5, "3.0.12"),
        (HYDRA, MPICH, "5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101 (id: 1)\n", INTEL, "2021.18"),
    ],
)
def test_families(text: str, family: str, version: str) -> None:
    assert family_of(text) == (family, version)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ConfigError, match="printed 'BusyBox v1'"):
        family_of("BusyBox v1\nand more")
    with pytest.raises(ConfigError, match="printed 'nothing'"):
        family_of("")


def test_find_and_identify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = program(tmp_path, "mpirun (Open MPI) 5.0.11")
    assert identify(path) == Mpirun(path, OPEN_MPI_5, "5.0.11")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere"))
    assert find_mpirun(environ={"PATH": str(tmp_path)}) == path
    with pytest.raises(ConfigError, match="-n needs an mpirun"):
        find_mpirun(environ={"PATH": str(tmp_path / "empty")})
    with pytest.raises(ConfigError, match="cannot be run"):
        identify(str(tmp_path / "none"))


def test_the_script_of_intel_mpi_is_passed_over(tmp_path: Path) -> None:
    """It looks for mpiexec.hydra on PATH, where a wheel's need not be."""
    script = program(tmp_path, "not found")
    hydra = program(tmp_path, "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 2", "mpiexec.hydra")
    assert identify(script) == Mpirun(hydra, INTEL, "2021.18.1")


def test_the_wheel_comes_first_unless_another_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("own/bin", "system"):
        (tmp_path / folder).mkdir(parents=True)
    own, system = program(tmp_path / "own/bin", ""), program(tmp_path / "system", "", "mpiexec")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "own"))
    path = {"PATH": f"{tmp_path / 'system'}:{tmp_path / 'own/bin'}"}
    assert find_mpirun(path) == own
    assert find_mpirun({**path, "MPI4PY_LIBMPI": "libmpi.so.12"}) == system


@pytest.mark.parametrize(
    ("family", "info", "survives"),
    [
        (OPEN_MPI_5, "echo options:ft_mpi_support:yes", True),
        (OPEN_MPI_5, "echo options:ft_mpi_support:no", False),
        (OPEN_MPI_5, None, True),
        (OPEN_MPI_4, "echo", False),
        (MPICH, None, False),
        (INTEL, None, False),
    ],
)
def test_whose_jobs_survive_a_rank(tmp_path: Path, family: str, info: str | None, *, survives: bool) -> None:
    if info is not None:
        (tmp_path / "ompi_info").write_text(f"#!/bin/sh\n{info}\n")
        (tmp_path / "ompi_info").chmod(0o755)
    found = Mpirun(str(tmp_path / "mpirun"), family)
    if survives:
        assert found.fault_tolerant() == ["--with-ft", "ulfm"]
    else:
        with pytest.raises(ConfigError, match=f"a job of {found.program}, {family}, ends with .*--restarts N starts"):
            found.fault_tolerant()


def test_options_of_each_family() -> None:
    five, four, mpich, intel = (Mpirun("mpirun", one) for one in (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL))
    shell = ["ssh", "-p", "22"]
    assert five.oversubscribed() + five.unbound() == ["--oversubscribe", "--bind-to", "none"]
    assert four.unbound() == ["--bind-to", "none"]
    assert mpich.oversubscribed() + mpich.unbound() + mpich.exported(["A"]) == []
    assert intel.unbound() == ["-genv", "I_MPI_PIN", "0"]
    assert five.exported(["A", "B"]) == ["-x", "A", "-x", "B"]
    assert five.on_hosts([("h1", 2), ("h2", 1)])[:2] == ["--host", "h1:2,h2:1"]
    assert mpich.on_hosts([("h1", 2), ("h2", 1)]) == ["-hosts", "h1:2,h2:1"]
    assert five.on_hosts([]) == mpich.on_hosts([]) == []
    assert five.remote_shell(shell)[:3] == ["--prtemca", "plm_ssh_agent", "ssh -p 22"]
    assert four.remote_shell(shell)[:3] == ["--mca", "plm_rsh_agent", "ssh -p 22"]
    assert mpich.remote_shell(shell) == ["-launcher", "ssh", "-launcher-exec", "ssh"]
    assert mpich.environment(shell) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 22"}
    assert intel.environment(shell) == {"I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-p 22"}
    assert mpich.environment(["ssh"]) == {}
    assert five.environment(shell) == {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for one in (five, four, mpich, intel):
        with pytest.raises(ConfigError, match="a space or nothing in a word: 'my key'"):
            one.remote_shell(["ssh", "-i", "my key"])
