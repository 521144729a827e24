"""`--launcher kubernetes`: prints a Kubeflow MPIJob (kubeflow.org/v2beta1), for `kubectl apply -f -`.

A pod for each worker, with room for its share of the servers; the operator starts sshd in them and writes the host
file. Its launcher pod runs `mpikv launch` over ssh, so roles, output and statuses are those of any other launcher. The
image has this package, an MPI, sshd and the program; volumes, GPUs and limits are added to the manifest by hand.

Values of `--env` stand in no manifest: they go into a file of their own, mode 600, with a Secret for `kubectl apply`,
from which the launcher's pod has them as one variable. Pods gain no privileges; with `--kube-user` they run as that
user and not as root, which the image must allow: its sshd then listens on a port above 1023, which `--ssh` names, and
`sshAuthMountPath` is added to the manifest by hand, with that user's `~/.ssh`.

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

from mpikv.commands.launch.environment import GIVEN, asked
from mpikv.common.files import write_private
from mpikv.errors import ConfigError

HOST_FILE = "/etc/mpi/hostfile"  # where the operator puts it
# Pods have new host keys in every job, and the operator's own key pair for this one job.
SSH = "ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")  # RFC 1035, with room for what the operator appends
BAD_INPUT = 2
SECRET_KEY = "variables"
AFTERWARDS_S = 60  # the job's own time limit ends it before the operator does


def run(options: argparse.Namespace) -> int:
    """Print the manifest. Status 2 where an option is wrong."""
    try:
        manifest = mpi_job(options)
        if given(options):
            _write_secret(options)
    except (ConfigError, ValueError) as error:
        print(f"mpikv launch: error: {error}", file=sys.stderr)
        return BAD_INPUT
    print("\n".join(yaml(manifest)))
    return 0


def given(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The variables of `--env` and its like, by role; {} where there are none. Raises ConfigError.

    Variables that were named alone get their value now: a pod has none of them.
    """
    return {role: pairs for role, pairs in asked(options, os.environ).items() if pairs}


def secret(options: argparse.Namespace) -> dict[str, Any]:
    """The Secret that goes with the manifest."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(options, f"{options.kube_name}-env"),
        "type": "Opaque",
        "stringData": {SECRET_KEY: json.dumps(given(options))},
    }


def _write_secret(options: argparse.Namespace) -> None:
    path = f"{options.kube_name}-env.yaml"
    try:
        write_private(path, "\n".join(yaml(secret(options))) + "\n")
    except FileExistsError:
        raise ConfigError(f"{path} is there already: remove it, the values of --env are written there") from None
    except OSError as error:
        raise ConfigError(f"{path}, for the values of --env: {error.strerror}") from None
    print(
        f"mpikv launch: the values of --env are in {path}, which you alone can read, and not in the manifest: "
        f"`kubectl apply -f {path}` before it, and remove the file",
        file=sys.stderr,
    )


def _metadata(options: argparse.Namespace, name: str) -> dict[str, str]:
    return {"name": name, **({"namespace": options.kube_namespace} if options.kube_namespace else {})}


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
    policy: dict[str, Any] = {"cleanPodPolicy": "Running", "backoffLimit": 0}
    if options.timeout is not None:
        policy["activeDeadlineSeconds"] = math.ceil(options.timeout) + AFTERWARDS_S
    return {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": _metadata(options, options.kube_name),
        "spec": {
            "slotsPerWorker": math.ceil((workers + servers) / workers),
            "launcherCreationPolicy": "WaitForWorkersReady",
            "runPolicy": policy,
            "mpiReplicaSpecs": {
                "Launcher": _replicas(1, "launcher", options, _command(options, servers)),
                "Worker": _replicas(workers, "worker", options, []),
            },
        },
    }


def _replicas(count: int, name: str, options: argparse.Namespace, command: list[str]) -> dict[str, Any]:
    security: dict[str, Any] = {"allowPrivilegeEscalation": False}
    if options.kube_user is not None:
        security |= {"runAsNonRoot": True, "runAsUser": options.kube_user}
    container: dict[str, Any] = {"name": name, "image": options.kube_image, "securityContext": security}
    if command:  # a worker without one runs sshd
        container["command"] = command
        if given(options):
            from_secret = {"secretKeyRef": {"name": f"{options.kube_name}-env", "key": SECRET_KEY}}
            container["env"] = [{"name": GIVEN, "valueFrom": from_secret}]
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}


def _command(options: argparse.Namespace, servers: int) -> list[str]:
    """What the launcher pod runs."""
    words = ["mpikv", "launch", "-n", str(options.num_workers), "-s", str(servers), "-H", HOST_FILE]
    words += ["--launcher", "ssh", "--ssh", options.ssh or SSH]
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
