"""The files of examples/cluster: read by the programs that read them, and with the fields that those require."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "cluster"
SCRIPTS = sorted(FOLDER.glob("*.sbatch")) + sorted(FOLDER.glob("*.sh"))
MANIFESTS = sorted(FOLDER.glob("*.yaml"))


def documents(name: str) -> dict[str, dict[str, Any]]:
    read = [each for each in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")) if each]
    return {each["kind"]: each for each in read}


def pod(template: dict[str, Any]) -> dict[str, Any]:
    """The spec of a pod, after the checks that hold for each."""
    spec = template["spec"]
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    assert spec["containers"]
    for container in spec["containers"]:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", container["name"])
        assert ":" in container["image"] and not container["image"].endswith(":latest")
        assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
        limits = container["resources"]["limits"]
        assert isinstance(limits["nvidia.com/gpu"], int)
        requests = container["resources"].get("requests", limits)
        assert requests["nvidia.com/gpu"] == limits["nvidia.com/gpu"]  # Kubernetes requires it of extended resources
    return spec


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_bash(script: Path):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "set -euo pipefail" in script.read_text()


def test_the_batch_script_asks_slurm_for_one_task_a_node():
    """torchrun starts the ranks of a node: a task for each GPU would start them eight times."""
    text = (FOLDER / "train.sbatch").read_text(encoding="utf-8")
    head = text.partition("\nset ")[0]
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", head, flags=re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "gpus-per-node", "time", "signal"} <= asked.keys()
    assert asked["ntasks-per-node"] == "1"
    assert f"--nproc-per-node {asked['gpus-per-node']}" in text
    assert len(re.findall(r"^#SBATCH", text, flags=re.MULTILINE)) == len(re.findall(r"^#SBATCH", head, re.MULTILINE))


@pytest.mark.parametrize("file", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_has_what_every_object_must_have(file: Path):
    for kind, each in documents(file.name).items():
        assert each["apiVersion"] and each["metadata"]["name"], kind
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", each["metadata"]["name"])
        assert each["spec"]


def test_the_job_gives_each_pod_a_rank_and_a_name():
    found = documents("torchrun-job.yaml")
    job, service = found["Job"], found["Service"]
    assert job["apiVersion"] == "batch/v1" and service["apiVersion"] == "v1"
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    one = pod(spec["template"])
    assert one["restartPolicy"] in ("Never", "OnFailure")
    assert one["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    command = one["containers"][0]["command"]
    assert command[0] == "torchrun" and f"--nnodes={spec['completions']}" in command
    gpus = one["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node={gpus}" in command
    assert "--node-rank=$(JOB_COMPLETION_INDEX)" in command
    assert f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}" in command
    assert command[command.index("-m") :][:4] == ["-m", "tether", "train", "ppo"]


def test_the_ray_job_has_a_head_and_workers():
    job = documents("rayjob.yaml")["RayJob"]
    assert job["apiVersion"] == "ray.io/v1"
    spec = job["spec"]
    cluster = spec["rayClusterSpec"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", cluster["rayVersion"])
    head = cluster["headGroupSpec"]
    assert isinstance(head["rayStartParams"], dict)
    containers = pod(head["template"])["containers"]
    gpus = containers[0]["resources"]["limits"]["nvidia.com/gpu"]
    assert spec["entrypoint"].startswith(f"torchrun --nproc-per-node {gpus} -m tether train ")
    for group in cluster["workerGroupSpecs"]:
        assert group["groupName"] and isinstance(group["rayStartParams"], dict)
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        pod(group["template"])
    images = {container["image"] for group in (head, *cluster["workerGroupSpecs"])
              for container in group["template"]["spec"]["containers"]}  # fmt: skip
    assert len(images) == 1  # Ray requires one version of itself and of Python on all nodes


def test_the_page_names_every_file():
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert all(f"examples/cluster/{file.name}" in page for file in (*SCRIPTS, *MANIFESTS))
