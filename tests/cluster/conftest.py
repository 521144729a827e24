"""Fixtures: hosts, and a real sshd, Slurm or Grid Engine on them; what cannot be here is skipped with its reason.

Tests that only `scripts/test --cluster` runs carry the mark `cluster_full`; the others are the selection that every run
of the tests makes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import digits
import grid_engine as grid_engine_module
import jobs
import namespaces
import pytest
import slurm as slurm_module
import sshd as sshd_module
import training
from grid_engine import GridEngine
from namespaces import Network
from needs import find, need
from slurm import Slurm

N_HOSTS = 3


@pytest.fixture(params=["openmpi", "mpich"])
def mpi(request: pytest.FixtureRequest) -> jobs.Mpi:
    return find(request.param)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits.write(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def learned(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., training.Weights]:
    """learned(workers): the weights that so many workers find on one machine."""
    folder = tmp_path_factory.mktemp("learned")
    return functools.cache(lambda workers, **more: training.on_one_machine(workers, images, folder, **more))


@pytest.fixture
def hosts() -> Iterator[Network]:
    need(namespaces.missing())
    with namespaces.network(N_HOSTS) as made:
        yield made


@pytest.fixture
def ssh_hosts() -> Iterator[Network]:
    need(namespaces.missing(), sshd_module.missing())
    with namespaces.network(N_HOSTS) as made, sshd_module.sshd(made):
        yield made


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    need(namespaces.missing(), slurm_module.missing())
    with namespaces.network(N_HOSTS) as made, slurm_module.slurm(made, cpus=4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def grid_engine() -> Iterator[GridEngine]:
    """A real Grid Engine on three hosts with 2 slots each, for all tests."""
    need(namespaces.missing(), grid_engine_module.missing())
    with namespaces.network(N_HOSTS) as made, grid_engine_module.grid_engine(made, slots=2) as cluster:
        yield cluster
