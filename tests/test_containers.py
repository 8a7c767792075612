"""The image and the files for Kubernetes: valid, and they fit the scripts and each other.

benchmarks/container.sh runs the Dockerfile's steps; that takes five minutes and is no test here.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import jsonschema
import kubernetes_validate
import pytest
import yaml
from helpers import ROOT

import clip_reward
import sac_clip_humanoid as sac
from training.flags import flags_of, parse_args

FILES = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / "kube").glob("*.yaml")}
JOB, RAY, VOLUME = (FILES[name] for name in ("job.yaml", "rayjob.yaml", "volume.yaml"))
CLUSTER = RAY["spec"]["rayClusterSpec"]
HEAD, (WORKERS,) = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]
TEMPLATES = [JOB["spec"]["template"], HEAD["template"], WORKERS["template"]]
PODS = [template["spec"] for template in TEMPLATES]
CONTAINERS = [container for pod in PODS for container in pod["containers"]]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def fields(**kinds):
    """JSON schema of an object that has these fields and no others."""
    return {"type": "object", "properties": kinds, "additionalProperties": False}


TEXT, NUMBER, TRUTH = ({"type": kind} for kind in ("string", "integer", "boolean"))
TEMPLATE = fields(metadata={}, spec={"type": "object"})  # validated as a pod
START = {"type": "object", "additionalProperties": TEXT}
GROUP = {"rayStartParams": START, "template": TEMPLATE}
REPLICAS = {"groupName": TEXT, "replicas": NUMBER, "minReplicas": NUMBER, "maxReplicas": NUMBER}
# KubeRay's definition of a RayJob is in no package of PyPI, npm or Debian. These are those of its
# fields that are used here, by its reference of ray.io/v1.
RAYJOB = fields(
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(name=TEXT),
    spec=fields(
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]},
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes=TRUTH,
        ttlSecondsAfterFinished=NUMBER,
        entrypoint=TEXT,
        rayClusterSpec=fields(
            rayVersion=TEXT,
            authOptions=fields(mode={"enum": ["disabled", "token"]}),
            enableInTreeAutoscaling=TRUTH,
            autoscalerOptions=fields(idleTimeoutSeconds=NUMBER),
            headGroupSpec=fields(**GROUP),
            workerGroupSpecs={"type": "array", "items": fields(**GROUP, **REPLICAS)},
        ),
    ),
)


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_all_is_valid_for_kubernetes(version):
    pods = [{"apiVersion": "v1", "kind": "Pod", "metadata": {}} | x for x in TEMPLATES]
    for document in [*FILES.values(), *pods]:
        if document is not RAY:
            kubernetes_validate.validate(document, version, strict=True)


def test_the_rayjob_is_one_that_kuberay_takes():
    jsonschema.validate(RAY, RAYJOB)
    assert RAY["spec"]["shutdownAfterJobFinishes"], "else it cannot be suspended"
    assert HEAD["template"]["spec"]["restartPolicy"] == "Never", "SidecarMode wants it"
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= WORKERS["maxReplicas"]
    assert "nvidia.com/gpu" not in HEAD["template"]["spec"]["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    "command",
    [CONTAINERS[0]["command"], shlex.split(RAY["spec"]["entrypoint"])],
    ids=["job.yaml", "rayjob.yaml"],
)
def test_the_script_takes_the_command_and_resumes(command, tmp_path, monkeypatch):
    """All checks but the two that want the network and a GPU."""
    python, script, *words = [word.replace("/data", str(tmp_path)) for word in command]
    assert (python, script) == ("python", f"/app/{sac.__name__}.py")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which parse_args changes
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(clip_reward, "check_model", lambda *_: None)
    monkeypatch.setattr(clip_reward, "check_cost", lambda *_: None)
    monkeypatch.setattr(clip_reward, "ray_cluster", lambda: (None, "GPU"))
    args = parse_args(sac.Args, "")
    sac.check_args(args)
    assert args.reward.target_prompt == ("a humanoid robot kneeling",) and args.resume is None
    if command is not CONTAINERS[0]["command"]:
        assert args.reward.reward_devices == (f"ray:{WORKERS['maxReplicas']}",)
        assert "\n" not in RAY["spec"]["entrypoint"], "the submitter's shell would end it there"
    folder = tmp_path / "runs/run"  # as a first attempt leaves it
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/step_8.pt").touch()
    (folder / "args.json").write_text(json.dumps(flags_of(args)))
    assert parse_args(sac.Args, "").resume == str(folder)


def test_dockerfile_and_yaml_agree():
    user, group = map(int, re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.M).groups())
    assert f"useradd --uid {user} " in DOCKERFILE and f"--chown={user}:{group} " in DOCKERFILE
    assert re.search(r"^WORKDIR /app$", DOCKERFILE, re.M)
    for pod in PODS:
        security = pod["securityContext"]
        ids = [security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")]
        assert ids == [user, group, group] and security["runAsNonRoot"]
    assert len({container["image"] for container in CONTAINERS}) == 1
    assert {mount["mountPath"] for x in CONTAINERS for mount in x["volumeMounts"]} == {"/data"}
    claims = [pod["volumes"][0].get("persistentVolumeClaim") for pod in PODS]
    claim = {"claimName": VOLUME["metadata"]["name"]}
    assert claims == [claim, claim, None], "one pod has the claim"
    pins = (ROOT / "requirements.txt").read_text()
    assert f"ray[default]=={CLUSTER['rayVersion']}\n" in pins, "default: it takes jobs"
    env = {x["name"]: x["value"] for x in CONTAINERS[1]["env"]}
    learners = [pod["terminationGracePeriodSeconds"] for pod in PODS[:2]]
    assert min(learners) >= int(env["RAY_JOB_STOP_WAIT_TIME_S"]) >= 300
    sleep = int(CONTAINERS[2]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert sleep < PODS[2]["terminationGracePeriodSeconds"]


def test_the_hook_sends_one_sigterm_and_waits_for_the_end():
    """To a stand-in with the script's command line that takes a second to end."""
    name = f"/app/sac_clip_{os.getpid()}"  # of no other process
    hook = CONTAINERS[1]["lifecycle"]["preStop"]["exec"]["command"]
    assert "python /app/sac_clip" in hook[2] and "python /app/sac_clip" in RAY["spec"]["entrypoint"]
    stand_in = 'trap "n=1$n" TERM; echo ready; until [ $n ]; do sleep 0.1; done; sleep 1; echo $n'
    words = ["bash", "-c", f"exec -a 'python {name}.py' bash -c '{stand_in}'"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    subprocess.run([*hook[:2], hook[2].replace("/app/sac_clip", name)], check=True, timeout=60)
    assert process.wait(1) == 0 and process.stdout.read() == "1\n"


def names(requirements):
    return set(re.findall(r"^[\w-]+", requirements, re.M))


def test_the_image_has_all_code_and_nothing_else():
    """Git reads .dockerignore as Docker does."""
    command = ["git", "ls-files", "--others", "--exclude-from=.dockerignore"]
    environment = os.environ | {"GIT_INDEX_FILE": "/nonexistent"}  # where nothing is tracked
    files = subprocess.check_output(command, cwd=ROOT, env=environment, text=True).split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    wanted = {name.partition("/")[0] for name in wheel} | {"requirements.txt"}
    tops = {name.partition("/")[0] for name in files}
    assert tops == wanted | {"benchmarks", "examples"}
    assert "tiny_clip/open_clip_model.safetensors" in files
    assert not [name for name in files if "__pycache__" in name]
    script = re.search(r"sed '(.*?)' /tmp/requirements.txt", DOCKERFILE)[1]
    kept = subprocess.check_output(["sed", script, ROOT / "requirements.txt"], text=True)
    extras = project["project"]["optional-dependencies"]
    in_image = [*project["project"]["dependencies"], *extras["train"], *extras["eval"]]
    in_image += [*extras["track"], *extras["ray"]]
    assert names(kept) == names("\n".join(in_image)) - {"clip-reward"}
    everything = names((ROOT / "requirements.txt").read_text())
    wanted = names("\n".join([*extras["label"], *extras["dev"]])) - {"clip-reward"}
    assert everything - names(kept) == wanted
