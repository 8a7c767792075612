# make train: set everything up, train the humanoid to kneel with the embedded CLIP, judge the result
# make test:  set everything up, then run the tests (make test-all: the slow ones as well)
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
GL_PACKAGES := libegl1 libgl1-mesa-dri libgles2
DRAW := import egl_render; egl_render.setup_gl(); egl_render.gl_renderer()
# apt-get runs as root, or with sudo without a password; otherwise it fails
APT := $(if $(filter 0,$(shell id -u)),,sudo -n) env DEBIAN_FRONTEND=noninteractive apt-get -qq
INSTALL := $(APT) update && $(APT) install -y --no-install-recommends >/dev/null

.PHONY: help setup dev gl browser train test test-all coverage lint tensorboard tiny_clip clean

help:
	@sed -n '1,2s/^# //p' Makefile

setup: $(VENV)/.installed

dev: $(VENV)/.installed-dev gl

PIP := $(PY) -m pip install --disable-pip-version-check -q
# uv installs the same packages in a fifth of the time; if uv fails, pip installs them.
REQUIREMENTS = $(PIP) uv && $(PY) -m uv pip install -q --python $(PY) -r $(1) || $(PIP) -r $(1)

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "this Python cannot make a venv; on Debian type: apt-get install -y python3-venv"; exit 1; }
	$(call REQUIREMENTS,requirements.txt)
	@touch $@

# The tests start hundreds of processes. Where Python keeps no bytecode, each of them would compile all
# packages that it imports, so they are compiled once. One picture compiles Warp's kernels once, too.
WARM := import numpy, sac_clip_humanoid as sac; \
	sac.make_renderer(sac.Args(clip_model="tiny_clip", renderer="warp")).render(numpy.zeros((1, 47)))

$(VENV)/.installed-dev: $(VENV)/.installed requirements-dev.txt
	$(call REQUIREMENTS,requirements-dev.txt)
	@$(PY) -m compileall -q -j 2 $(VENV)/lib >/dev/null || true
	@$(PY) -c '$(WARM)'
	@touch $@

# The tests compare Warp's pictures with OpenGL's. Install the system's EGL if it is missing; if the
# installation fails, print the command.
gl: $(VENV)/.installed
	@$(PY) -c '$(DRAW)' 2>/dev/null || { \
		echo "no OpenGL to draw with; installing $(GL_PACKAGES)"; \
		$(INSTALL) $(GL_PACKAGES); \
		$(PY) -c '$(DRAW)' 2>/dev/null || { \
			echo "the installation failed; type as root: apt-get update && apt-get install -y $(GL_PACKAGES)"; \
			exit 1; }; }

# Install the browser in which the labelling page is tested, if it is missing.
browser:
	@command -v chromedriver >/dev/null || { \
		echo "no chromedriver found; installing Chromium to test the labelling page"; \
		$(INSTALL) chromium chromium-driver \
			|| echo "the installation failed: the page's tests will fail and say what to install"; }

# The defaults are the recipe (docs/results.md). With a GPU and the real CLIP see the README.
# Python keeps its bytecode: otherwise the learner, the workers and the judge would each compile all packages.
train: export PYTHONDONTWRITEBYTECODE :=
train: $(VENV)/.installed
	set -e; runs=runs/kneeling_$$(date +%Y-%m-%d_%H-%M-%S); \
	$(PY) sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" --clip-model tiny_clip \
		--total-timesteps 24000 --runs-dir $$runs; \
	$(PY) eval_epic.py success --run $$runs --videos 4

# Run two tests at a time, as on a machine with two cores.
test: dev browser
	$(PY) -m pytest -n 2 --dist loadgroup -m "not slow"

test-all: test
	$(PY) -m pytest -n 2 --dist loadgroup -m slow

# Measure the coverage of the top-level files, evaluation/ and training/, with their subprocesses.
coverage: dev browser
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest -n 2 --dist loadgroup
	$(PY) -m coverage combine -q
	$(PY) -m coverage report --sort=cover

lint: dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

tensorboard: setup
	$(PY) -m tensorboard.main --logdir runs

# Retrain the embedded CLIP (346 minutes on two cores) and measure it. The second command continues
# with more pictures of the plain scene, of which there had been too few; the third adds CartPole and
# MountainCar; the fourth adds half poses, states of policies and cameras from all sides; the others
# add near misses, limbs in any position and ever more states that policies visited. The last two see
# mostly pictures by MuJoCo Warp at 64 px, from the three cameras of the humanoid's default.
MORE = $(PY) tiny_clip/train.py --init tiny_clip --epochs 4 \
	--shares 0.22 0.40 0.12 0.07 0.05 0.03 0.04 0.04 0.03
LAST = $(PY) tiny_clip/train.py --init tiny_clip --epochs 3 --lr 7e-4 \
	--shares 0.08 0.56 0.08 0.08 0.05 0.04 0.03 0.04 0.04
tiny_clip: dev
	$(PY) tiny_clip/train.py
	$(PY) tiny_clip/train.py --init tiny_clip --seed 2 --pictures 12000 --shares 0.3 0.2 0.5 \
		--epochs 5 --lr 5e-4
	$(PY) tiny_clip/train.py --init tiny_clip --seed 3 --pictures 30000 --epochs 5 --lr 7e-4 \
		--shares 0.16 0.12 0.12 0.22 0.12 0.06 0.07 0.08 0.05
	$(PY) tiny_clip/train.py --init tiny_clip --seed 4 --pictures 84000 --epochs 4 --lr 8e-4 \
		--shares 0.25 0.25 0.15 0.11 0.07 0.04 0.05 0.05 0.03
	$(PY) tiny_clip/train.py --init tiny_clip --seed 5 --pictures 64000 --epochs 4 --lr 8e-4 \
		--shares 0.28 0.30 0.12 0.09 0.06 0.03 0.04 0.05 0.03
	$(PY) tiny_clip/train.py --init tiny_clip --seed 6 --pictures 90000 --epochs 3 --lr 8e-4 \
		--shares 0.28 0.34 0.12 0.07 0.05 0.03 0.04 0.04 0.03
	$(MORE) --seed 7 --pictures 100000 --lr 8e-4
	$(MORE) --seed 8 --pictures 100000 --lr 8e-4
	$(MORE) --seed 9 --pictures 100000 --lr 8e-4
	$(MORE) --seed 10 --pictures 64000 --lr 6e-4
	$(MORE) --seed 11 --pictures 100000 --lr 6e-4
	$(LAST) --seed 15 --pictures 84000
	$(LAST) --seed 16 --pictures 96000
	$(PY) tiny_clip/evaluate.py > tiny_clip/figures.md

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
