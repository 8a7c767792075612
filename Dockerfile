# docker build -t clip-reward .
# docker run --init --gpus all -v clip-reward:/data clip-reward \
#     python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" \
#     --clip-cache-dir /data/clip --runs-dir /data/runs
#
# Debian 12 has the Python (3.11) that requirements.txt was tested with, and debootstrap makes the
# same system without Docker: benchmarks/container.sh runs the steps below in it.
FROM debian:bookworm-slim
# procps stops a run in its pod, wget is what KubeRay asks with whether Ray is well (kube/rayjob.yaml).
# --compile wants a compiler: add g++ python3-dev.
RUN apt-get update && apt-get install -y --no-install-recommends \
    python3-venv ca-certificates libegl1 libgl1-mesa-dri libgles2 procps wget \
    && rm -rf /var/lib/apt/lists/*
# NVIDIA's container runtime brings the GPU's own EGL when graphics is among the capabilities;
# this file tells the EGL loader that it is there.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
RUN mkdir -p /usr/share/glvnd/egl_vendor.d && echo \
    '{"file_format_version":"1.0.0","ICD":{"library_path":"libEGL_nvidia.so.0"}}' \
    > /usr/share/glvnd/egl_vendor.d/10_nvidia.json
# The user, and where it may write; a new volume mounted at /data is its own as well.
RUN useradd --uid 1000 --create-home trainer && install -d -o 1000 -g 1000 /app /data
# The environment is /usr/local itself: KubeRay's login shells forget every other PATH.
RUN python3 -m venv /usr/local
COPY requirements.txt /tmp/
RUN sed '/^# labelling/Q' /tmp/requirements.txt | pip install --no-cache-dir -r /dev/stdin
# The code, last: a change of it makes a new image in seconds.
WORKDIR /app
COPY --chown=1000:1000 . .
USER 1000:1000
CMD ["python", "sac_clip_humanoid.py", "--help"]
