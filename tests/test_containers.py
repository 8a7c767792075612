"""The image and the files for Kubernetes: valid, and they fit the scripts and each other.

benchmarks/container.sh runs the Dockerfile's steps; that takes five minutes and is no test here.
"""

import ast
import importlib.metadata
import json
import os
import re
import shlex
import signal
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
from training.run import parse_args

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
    """On a machine with a GPU; nothing is downloaded."""
    python, script, *words = [word.replace("/data", str(tmp_path)) for word in command]
    assert (python, script) == ("python", f"/app/{sac.__name__}.py")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # which parse_args changes
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(clip_reward, "ensure_downloaded", lambda *_: None)
    monkeypatch.setattr(clip_reward, "cuda_devices", lambda: ["cuda:0"])
    args = parse_args(sac.Args, "")
    sac.check_args(args)
    assert args.target_prompt == ("a humanoid robot kneeling",) and args.resume is None
    if command is not CONTAINERS[0]["command"]:
        assert args.reward_devices == (f"ray:{WORKERS['maxReplicas']}",)
        assert "\n" not in RAY["spec"]["entrypoint"], "the submitter's shell would end it there"
    folder = tmp_path / "runs/run"  # as a first attempt leaves it
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/step_8.pt").touch()
    (folder / "args.json").write_text(json.dumps(vars(args)))
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
    pins = (ROOT / "requirements-dev.txt").read_text()
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


PINS = {path.name: path.read_text() for path in sorted(ROOT.glob("requirements*.txt"))}


def names(requirements):
    return {name.lower() for name in re.findall(r"^\w[\w-]*", requirements, re.M)}


SCRIPTS = "clip_reward egl_render sac_clip_humanoid dqn_clip_classic eval_epic".split()
SCRIPTS += ["reward_head", "warp_render"]
FOLDERS = ["environments", "evaluation", "scenes", "tiny_clip", "training"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_image_has_all_code_and_nothing_else():
    """Git reads .dockerignore as Docker does."""
    command = ["git", "ls-files", "--others", "--exclude-from=.dockerignore"]
    environment = os.environ | {"GIT_INDEX_FILE": "/nonexistent"}  # where nothing is tracked
    files = subprocess.check_output(command, cwd=ROOT, env=environment, text=True).split()
    tops = {name.partition("/")[0] for name in files}
    scripts = {f"{name}.py" for name in SCRIPTS}
    assert tops == scripts | {*FOLDERS, "benchmarks", "examples", *PINS}
    assert "tiny_clip/open_clip_model.safetensors" in files
    assert not [name for name in files if "__pycache__" in name]
    assert re.search(r"^ENV HF_HOME=/data/", DOCKERFILE, re.M), "or each pod downloads the weights"


def imported(paths):
    """Names of the distributions that these files import."""
    found = set()
    for node in (node for path in paths for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    distributions = importlib.metadata.packages_distributions()
    return {distributions[name][-1].lower() for name in found if name in distributions}


def test_the_image_has_every_package_that_is_needed_and_no_other():
    script = re.search(r"sed -i '(.*?)' /tmp/requirements-dev.txt", DOCKERFILE)[1]
    kept, everything = names(PINS["requirements.txt"]), names("\n".join(PINS.values()))
    kept |= names(
        subprocess.check_output(["sed", script, ROOT / "requirements-dev.txt"], text=True)
    )
    folders = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.py")]
    extras = PROJECT["project"]["optional-dependencies"]
    used = imported([*(ROOT / f"{name}.py" for name in SCRIPTS), *folders]) - {"openai"}
    used |= names("\n".join(extras["warp"]))
    with_others = {"pyopengl", "pygame-ce", "timm", "threadpoolctl"}  # what needs them brings them
    assert used - with_others <= kept
    assert kept - used <= {"transformers", "pandas", "pyarrow"}  # of tokenizers and of Ray Tune
    library = names("\n".join([*PROJECT["project"]["dependencies"]]))
    optional = [package for extra in ("warp", "int8", "track", "ray") for package in extras[extra]]
    assert library | names("\n".join(optional)) <= kept
    development = names("\n".join([*extras["vlm"], *extras["dev"]])) - {"clip-reward"}
    assert everything - kept == development


def test_a_wheel_is_the_library_and_its_data():
    """tests/wheel.py installs it."""
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert all((ROOT / source).is_file() for source in wheel)
    code = {source: target for source, target in wheel.items() if target.endswith(".py")}
    library = SCRIPTS[:2]
    packages = {f"{name}.py": f"{name}/__init__.py" for name in library}
    single = {"warp_render.py", "reward_head.py"}
    assert code == packages | {name: name for name in single}
    assert {target.partition("/")[0] for target in wheel.values()} == {*library, *single}
    for source in (ROOT / "scenes").glob("*.png"):
        assert wheel[f"scenes/{source.name}"] == f"egl_render/scenes/{source.name}"
    assert "scripts" not in PROJECT["project"]
    files = [ROOT / f"{name}.py" for name in library]
    optional = {"timm", "torchao", "pyopengl", "tensorboard"}
    needed = imported(files) - {"clip_reward", "egl_render"} - optional
    assert needed <= names("\n".join(PROJECT["project"]["dependencies"]))
