"""The manifest of `--launcher kubernetes`: the documented fields of an MPIJob, and a published client.

Fields and types: github.com/kubeflow/mpi-operator, sdk/python/v2beta1/docs; of pods: the Kubernetes API, core/v1.
The client package `kubeflow-training` has the MPIJob of v1, whose replicas and run policy are those of v2beta1.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpikv.__main__ import main
from mpikv.commands.launch import environment
from mpikv.commands.launch.kubernetes import yaml
from mpikv.errors import ConfigError

REPLICA = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": {
        "spec": {
            "containers": [
                {
                    "name": str,
                    "image": str,
                    "command": [str],
                    "env": [{"name": str, "valueFrom": {"secretKeyRef": {"name": str, "key": str}}}],
                    "securityContext": {"allowPrivilegeEscalation": bool, "runAsNonRoot": bool, "runAsUser": int},
                }
            ]
        }
    },
}
FIELDS: dict[str, Any] = {
    "apiVersion": {"kubeflow.org/v2beta1"},
    "kind": {"MPIJob"},
    "metadata": {"name": str, "namespace": str},
    "spec": {
        "slotsPerWorker": int,
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "runPolicy": {"cleanPodPolicy": {"None", "Running", "All"}, "backoffLimit": int, "activeDeadlineSeconds": int},
        "mpiReplicaSpecs": {"Launcher": REPLICA, "Worker": REPLICA},
    },
}


def check(value: Any, fields: Any, where: str = "") -> None:
    """Every field is a known one and has the type, or one of the words, that it may have."""
    if isinstance(fields, dict):
        assert isinstance(value, dict), where
        for name in value:
            assert name in fields, f"{where}.{name}"
            check(value[name], fields[name], f"{where}.{name}")
    elif isinstance(fields, list):
        assert isinstance(value, list), where
        for one in value:
            check(one, fields[0], where)
    elif isinstance(fields, set):
        assert value in fields, where
    else:
        assert type(value) is fields, where


def parse(lines: list[str], indent: int = 0) -> tuple[Any, list[str]]:
    """A reader of the part of YAML that is written here, to read it back: block mappings, block lists, JSON scalars."""
    result: Any = None
    while lines:
        line = lines[0]
        depth = len(line) - len(line.lstrip())
        if depth < indent:
            break
        assert depth == indent, line
        if line.lstrip().startswith("- "):
            result = [] if result is None else result
            text = line.lstrip()[2:]
            if text[0] in '"{[' or text[0].isdigit():
                result.append(json.loads(text))
                lines = lines[1:]
            else:
                item, lines = parse([" " * (indent + 2) + text, *lines[1:]], indent + 2)
                result.append(item)
        else:
            result = {} if result is None else result
            key, _, text = line.strip().partition(":")
            if text:
                result[key] = json.loads(text)
                lines = lines[1:]
            else:
                result[key], lines = parse(lines[1:], indent + 2)
    return result, lines


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["launch", "--launcher", "kubernetes", "--kube-image", "registry/train:1", *words]) == 0
    found, rest = parse(capsys.readouterr().out.splitlines())
    assert rest == []
    assert isinstance(found, dict)
    return found


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the Secret is written."""
    monkeypatch.chdir(tmp_path)


def test_fields(capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(
        capsys, "-n", "4", "-s", "2", "--env", "WHO=me", "--timeout", "90.5", "--kube-user", "1000",
        "--kube-name", "j-1", "--kube-namespace", "ml", "python", "train.py", "--flag", "on",
    )  # fmt: skip
    check(job, FIELDS)
    spec = job["spec"]
    assert job["metadata"] == {"name": "j-1", "namespace": "ml"}
    assert (spec["slotsPerWorker"], spec["mpiReplicaSpecs"]["Worker"]["replicas"]) == (2, 4)
    assert spec["runPolicy"]["activeDeadlineSeconds"] == 151
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    command = launcher["command"]
    assert command[:8] == ["mpikv", "launch", "-n", "4", "-s", "2", "-H", "/etc/mpi/hostfile"]
    assert command[-4:] == ["python", "train.py", "--flag", "on"]
    (worker,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert "command" not in worker
    assert "env" not in worker
    for container in (launcher, worker):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "runAsNonRoot": True, "runAsUser": 1000,
        }  # fmt: skip


def test_values_are_in_a_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a file that its user alone can read; the launcher's pod gives them to the ranks by role."""
    monkeypatch.setenv("WHO", "it's: me\n#")
    words = ["--env", "WHO", "--env-worker", "A=yes", "--env-server", "A=b c", "--kube-namespace", "ml", "train"]
    assert main(["launch", "--launcher", "kubernetes", "--kube-image", "i", "-n", "2", *words]) == 0
    out, err = capsys.readouterr()
    assert not any(value in out for value in ("it's", "yes", "b c"))
    assert "`kubectl apply -f mpikv-env.yaml`" in err
    file = tmp_path / "mpikv-env.yaml"
    assert file.stat().st_mode & 0o777 == 0o600
    found, _ = parse(file.read_text().splitlines())
    assert (found["apiVersion"], found["kind"]) == ("v1", "Secret")
    assert found["metadata"] == {"name": "mpikv-env", "namespace": "ml"}
    (launcher,) = parse(out.splitlines())[0]["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    ((name, source),) = [(one["name"], one["valueFrom"]["secretKeyRef"]) for one in launcher["env"]]
    assert source["name"] == "mpikv-env"
    assert environment.given({name: found["stringData"][source["key"]]}) == {
        "all": {"WHO": "it's: me\n#"}, "worker": {"A": "yes"}, "server": {"A": "b c"},
    }  # fmt: skip
    assert main(["launch", "--launcher", "kubernetes", "--kube-image", "i", "-n", "2", *words]) == 2
    assert "mpikv-env.yaml is there already" in capsys.readouterr().err


def test_given() -> None:
    assert environment.given({}) == {"all": {}, "worker": {}, "server": {}}
    for text in ("[", "[]", '{"all": 1}'):
        with pytest.raises(ConfigError, match="no JSON of variables"):
            environment.given({environment.GIVEN: text})


def test_a_server_with_each_worker_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(capsys, "-n", "3", "python", "train.py")
    check(job, FIELDS)
    assert job["spec"]["slotsPerWorker"] == 2
    assert "namespace" not in job["metadata"]
    assert manifest(capsys, "-n", "3", "-s", "0", "x")["spec"]["slotsPerWorker"] == 1


def test_published_client(capsys: pytest.CaptureFixture[str]) -> None:
    """The client's own classes take every replica and the run policy, and give back what they took."""
    client = pytest.importorskip("kubeflow.training", reason="pip install kubeflow-training")
    kubernetes = pytest.importorskip("kubernetes")
    spec = manifest(capsys, "-n", "2", "--timeout", "60", "python", "train.py")["spec"]
    api = kubernetes.client.ApiClient()

    class Answer:
        def __init__(self, value: Any) -> None:
            self.data = json.dumps(value)

    from kubeflow.training import models

    def through(value: dict[str, Any], kind: str) -> Any:
        fields = {json_name: name for name, json_name in getattr(models, kind).attribute_map.items()}
        made = getattr(models, kind)(**{fields[name]: item for name, item in value.items()})
        return api.sanitize_for_serialization(made)

    assert client
    assert through(spec["runPolicy"], "KubeflowOrgV1RunPolicy") == spec["runPolicy"]
    for replica in spec["mpiReplicaSpecs"].values():
        assert through(replica, "KubeflowOrgV1ReplicaSpec") == replica
        template = api.deserialize(Answer(replica["template"]), "V1PodTemplateSpec")
        assert api.sanitize_for_serialization(template) == replica["template"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs --kube-image"),
        (["--kube-image", "x", "--kube-name", "Not_this"], "lower-case letters"),
        (["--kube-image", "x", "--hosts", "a"], "takes no --hosts"),
        (["--kube-image", "x", "--env", "NO_SUCH"], "no such variable"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["launch", "-n", "1", "--launcher", "kubernetes", *words, "python", "t.py"]) == 2
    assert message in capsys.readouterr().err


def test_yaml() -> None:
    value = {"a": [1, "x", {"b": "y: #", "c": [{"d": "no"}]}], "e": {}, "f": True}
    assert yaml(value) == [
        "a:", "  - 1", '  - "x"', '  - b: "y: #"', "    c:", '      - d: "no"', "e: {}", "f: true",
    ]  # fmt: skip
    assert parse(yaml(value))[0] == value
