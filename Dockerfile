# docker build -t clip-reward .
# docker run --init --gpus all -v clip-reward:/data clip-reward \
#     python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling" --runs-dir /data/runs
#
# Debian 12 has the Python (3.11) that the requirements were tested with. benchmarks/container.sh runs the
# steps below without Docker, in a Debian made by debootstrap.
FROM debian:bookworm-slim
# procps stops a run in its pod; KubeRay's health checks use wget (kube/rayjob.yaml). For --compile add
# a compiler: g++ python3-dev.
RUN apt-get update && apt-get install -y --no-install-recommends \
    python3-venv ca-certificates libegl1 libopengl0 libgl1-mesa-dri libgles2 procps wget \
    && rm -rf /var/lib/apt/lists/*
# With the graphics capability, NVIDIA's container runtime brings the GPU's own EGL; the file that is
# written below tells the EGL loader about it.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
# GKE mounts the driver's libraries here, EGL's among them.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64
RUN mkdir -p /usr/share/glvnd/egl_vendor.d && echo \
    '{"file_format_version":"1.0.0","ICD":{"library_path":"libEGL_nvidia.so.0"}}' \
    > /usr/share/glvnd/egl_vendor.d/10_nvidia.json
# The user may write to both folders; a new volume mounted at /data belongs to the user as well.
RUN useradd --uid 1000 --create-home trainer && install -d -o 1000 -g 1000 /app /data
# The environment is /usr/local itself: KubeRay's login shells reset PATH.
RUN python3 -m venv /usr/local
COPY requirements*.txt /tmp/
RUN sed -i '/^# labelling/,$d' /tmp/requirements-dev.txt && \
    pip install --no-cache-dir -r /tmp/requirements-dev.txt
# Downloaded weights are stored on the volume.
ENV HF_HOME=/data/huggingface
# The code comes last, so that changing it rebuilds the image in seconds.
WORKDIR /app
COPY --chown=1000:1000 . .
USER 1000:1000
CMD ["python", "sac_clip_humanoid.py", "--help"]
