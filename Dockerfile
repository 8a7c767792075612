# docker build -t clip-reward .
# docker run --gpus all -v $PWD/runs:/app/runs clip-reward \
#     python sac_clip_humanoid.py --target-prompt "a humanoid robot kneeling"
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends \
    make g++ libegl1 libgl1-mesa-dri libgles2 && rm -rf /var/lib/apt/lists/*
# NVIDIA's container runtime brings the GPU's own EGL when graphics is among the capabilities;
# this file tells the EGL loader that it is there.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility,graphics
RUN mkdir -p /usr/share/glvnd/egl_vendor.d && echo \
    '{"file_format_version":"1.0.0","ICD":{"library_path":"libEGL_nvidia.so.0"}}' \
    > /usr/share/glvnd/egl_vendor.d/10_nvidia.json
WORKDIR /app
COPY requirements.txt .
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
CMD ["python", "sac_clip_humanoid.py", "--help"]
