"""The manifests for Kubernetes, and the Dockerfile. There is no cluster and no Docker: pods are processes here."""

import importlib
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.project_tree import NEEDED
from tests.tiers import exhaustive, needs

from .places import EXAMPLES, ROOT

MANIFESTS = {file.stem: yaml.safe_load(file.read_text()) for file in (EXAMPLES / "kubernetes").glob("*.yaml")}
DOCKERFILE = (ROOT / "Dockerfile").read_text()

# The fields of an MPIJob, kubeflow.org/v2beta1, which no Python package has, and what they hold.
MPIJOB = {
    "slotsPerWorker": int,
    "sshAuthMountPath": str,
    "launcherCreationPolicy": str,
    "mpiImplementation": str,
    "runLauncherAsWorker": bool,
    "mpiReplicaSpecs": dict,
    "runPolicy": dict,
}
RUN_POLICY = {"cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "suspend"}
RESTART = {"Never", "OnFailure"}


def containers(kind: str) -> list[dict[str, Any]]:
    """Return the containers of a manifest; for TrainJob, what overrides that of its runtime."""
    spec = MANIFESTS[kind]["spec"]
    if kind == "trainjob":
        return [spec["trainer"]]
    templates = (
        [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
        if kind == "jobset"
        else [replicas["template"] for replicas in spec["mpiReplicaSpecs"].values()]
    )
    return [container for template in templates for container in template["spec"]["containers"]]


def words(kind: str) -> list[str]:
    """Return the command that the first container of a manifest runs, without the shell around it."""
    container = containers(kind)[0]
    if "args" not in container:
        return list(container["command"])
    assert container["command"] == ["sh", "-c"] and container["args"][0].startswith("exec ")
    return shlex.split(container["args"][0].replace("$(head", "'$(head").replace("1) -x", "1)' -x"))[1:]


# ---- what needs nothing but this repository -------------------------------------------------------------------------


def test_numbers_and_names_of_manifests_agree() -> None:
    assert {*MANIFESTS} == {"trainjob", "jobset", "mpijob"}
    for kind, manifest in MANIFESTS.items():
        assert manifest["metadata"] == {"name": "gpt"}
        for container in containers(kind):
            assert container["image"] == ("fusionlayer-mpi" if kind == "mpijob" else "fusionlayer")
        script = next(word for word in words(kind) if word.endswith(".py"))
        assert script.startswith("/workspace/examples/") and (EXAMPLES / Path(script).name).exists()
    job = MANIFESTS["jobset"]["spec"]["replicatedJobs"][0]
    spec, command = job["template"]["spec"], words("jobset")
    assert str(spec["parallelism"]) == str(spec["completions"]) == command[command.index("--nnodes") + 1]
    assert spec["completionMode"] == "Indexed"
    assert command[command.index("--master-addr") + 1] == f"gpt-{job['name']}-0-0.gpt"
    spec, command = MANIFESTS["mpijob"]["spec"], words("mpijob")
    pods = spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert command[command.index("-n") + 1] == str(pods * spec["slotsPerWorker"])


def test_an_image_gets_what_the_build_needs() -> None:
    """The Dockerfile names what it copies, and .dockerignore lets in what setup.py reads."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept)
    assert {*NEEDED} - {"MANIFEST.in"} <= {*kept} and "fusionlayer" in kept
    stages = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", DOCKERFILE, re.MULTILINE)
    assert stages == [("${BASE}", "build"), ("${BASE}", "train"), ("train", "mpi"), ("train", "")]
    copied = re.findall(r"^COPY (--from=build )?(\S+) \S+$", DOCKERFILE, re.MULTILINE)
    assert copied == [("", "."), ("--from=build ", "/wheels"), ("", "examples")]
    assert re.findall(r"^WORKDIR (\S+)$", DOCKERFILE, re.MULTILINE) == ["/src", "/workspace"]
    assert "StrictHostKeyChecking" not in DOCKERFILE, "ssh knows the keys of the image's hosts"
    assert f"--wheel-dir {copied[1][1]} ." in DOCKERFILE and f"{copied[1][1]}/*.whl" in DOCKERFILE


# ---- by the models that Kubeflow publishes --------------------------------------------------------------------------


@needs("kubeflow_trainer_api")
@exhaustive(guarded_by="tests/examples/test_kubernetes.py::test_numbers_and_names_of_manifests_agree")
@pytest.mark.medium
@pytest.mark.parametrize("kind", ["trainjob", "jobset", "mpijob"])
def test_manifests_fit_their_schemas(kind: str) -> None:
    """The models drop fields that they do not know, and refuse values of other types."""
    models: Any = importlib.import_module("kubeflow_trainer_api.models")
    manifest = MANIFESTS[kind]
    assert read(models.IoK8sApimachineryPkgApisMetaV1ObjectMeta, manifest["metadata"])
    if kind == "trainjob":
        assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1" and manifest["kind"] == "TrainJob"
        read(models.TrainerV1alpha1TrainJob, manifest)
    elif kind == "jobset":
        assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and manifest["kind"] == "JobSet"
        read(models.JobsetV1alpha2JobSet, manifest)
    else:
        assert manifest["apiVersion"] == "kubeflow.org/v2beta1" and manifest["kind"] == "MPIJob"
        spec = manifest["spec"]
        assert all(isinstance(value, MPIJOB[name]) for name, value in spec.items())
        assert spec["runPolicy"].keys() <= RUN_POLICY and spec["mpiReplicaSpecs"].keys() == {"Launcher", "Worker"}
        for replicas in spec["mpiReplicaSpecs"].values():
            assert replicas.keys() <= {"replicas", "restartPolicy", "template"} and replicas["restartPolicy"] in RESTART
            read(models.IoK8sApiCoreV1PodTemplateSpec, replicas["template"])


def read(model: Any, given: dict[str, Any]) -> Any:
    """Return the object of a model, which must hold all that was given."""
    made = model.from_dict(given)
    assert made.to_dict() == given
    return made
