"""`--launcher kubernetes`: prints a Kubeflow MPIJob (kubeflow.org/v2beta1), for `kubectl apply -f -`.

A pod for each worker, with room for its share of the servers; the operator starts sshd in them and writes the host
file. Its launcher pod runs `mpikv launch` over ssh, so roles, output and statuses are those of any other launcher. The
image has this package, an MPI, sshd and the program; volumes, GPUs and limits are added to the manifest by hand.

Nothing is sent to a cluster. The text is YAML with every string quoted as in JSON, which YAML contains: that needs no
library, and no word can be taken for a number or a boolean.
Fields: https://github.com/kubeflow/mpi-operator, sdk/python/v2beta1/docs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from typing import Any

from mpikv.errors import ConfigError
from mpikv.launch.environment import read_pairs

HOST_FILE = "/etc/mpi/hostfile"  # where the operator puts it
# Pods have new host keys in every job, and the operator's own key pair for this one job.
SSH = "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")  # RFC 1035, with room for what the operator appends
BAD_INPUT = 2
AFTERWARDS_S = 60  # the job's own time limit ends it before the operator does


def run(options: argparse.Namespace) -> int:
    """Print the manifest. Status 2 where an option is wrong."""
    try:
        manifest = mpi_job(options)
    except (ConfigError, ValueError) as error:
        print(f"mpikv launch: error: {error}", file=sys.stderr)
        return BAD_INPUT
    print("\n".join(yaml(manifest)))
    return 0


def mpi_job(options: argparse.Namespace) -> dict[str, Any]:
    """The manifest. Raises ConfigError."""
    for option in ("hostfile", "hosts", "sync_dst_dir", "output_dir"):
        if getattr(options, option) is not None:
            raise ConfigError(f"--launcher kubernetes takes no --{option.replace('_', '-')}: pods have their own files")
    if not options.kube_image:
        raise ConfigError("--launcher kubernetes needs --kube-image: a container image with mpikv, an MPI and sshd")
    if NAME.fullmatch(options.kube_name) is None:
        raise ConfigError(
            f"--kube-name {options.kube_name}: at most 42 lower-case letters, digits and -, a letter first"
        )
    workers = options.num_workers
    servers = workers if options.num_servers is None else options.num_servers
    metadata = {"name": options.kube_name}
    if options.kube_namespace:
        metadata["namespace"] = options.kube_namespace
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if options.timeout is not None:
        policy["activeDeadlineSeconds"] = math.ceil(options.timeout) + AFTERWARDS_S
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": metadata,
        "spec": {
            "slotsPerWorker": math.ceil((workers + servers) / workers),
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": policy,
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, "launcher", options.kube_image, _command(options, servers)),
                "Worker": _replicas(workers, "worker", options.kube_image, []),
            },
        },
    }


def _replicas(count: int, name: str, image: str, command: list[str]) -> dict[str, Any]:
    container: dict[str, Any] = {"name": name, "image": image}
    if command:  # a worker without one runs sshd
        container["command"] = command
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}


def _command(options: argparse.Namespace, servers: int) -> list[str]:
    """What the launcher pod runs. Variables that were named alone get their value now: a pod has none of them."""
    words = ["mpikv", "launch", "-n", str(options.num_workers), "-s", str(servers), "-H", HOST_FILE]
    words += ["--launcher", "ssh", "--ssh", options.ssh or SSH]
    for option in ("--env", "--env-worker", "--env-server"):
        texts = getattr(options, option[2:].replace("-", "_"))
        for name, value in read_pairs(option, texts, os.environ).items():
            words += [option, f"{name}={value}"]
    if options.timeout is not None:
        words += ["--timeout", f"{options.timeout:g}"]
    return [*words, *options.command]


def yaml(value: Any, indent: str = "") -> list[str]:
    """The lines of a mapping or a list in YAML's block form."""
    lines = []
    for key, item in value.items() if isinstance(value, dict) else ((None, item) for item in value):
        start = f"{indent}- " if key is None else f"{indent}{key}:"
        if isinstance(item, (dict, list)) and item:
            below = yaml(item, indent + "  ")
            if key is None:
                lines += [start + below[0].lstrip(), *below[1:]]
            else:
                lines += [start, *below]
        else:
            lines.append(f"{start}{' ' * (key is not None)}{json.dumps(item)}")
    return lines
