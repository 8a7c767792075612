"""MuJoCo's pictures without OpenGL: MuJoCo Warp casts rays on the device where CLIP is.

    renderer = WarpRenderer(model, size=480, camera=egl_render.PAPER_CAMERA, device="cuda:0")
    renderer.draw(states)         # [B, nq+nv] float64 -> torch [B, H, W, 3] uint8 on that device

The cameras are egl_render's. A picture differs from OpenGL's in its edges (one sample a pixel), its
shadows (hard) and the floor far away (`_fade`). Sites and tendons are not drawn.
"""

import contextlib
import importlib.util
import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from clip_reward import UsageError, first_line
from egl_render import (
    INSTALL_WARP,
    PAPER_CAMERA,
    Camera,
    MujocoRenderer,
    RenderArgs,
    gl_renderer,
)

if TYPE_CHECKING:
    import mujoco

PIXELS = 2**22  # that are drawn at once, of at most 64 states
NEAR, FAR = 1.2, 2.5  # camera distances at which a floor begins to fade and is faded, at 64 px


def make_mujoco_renderer(
    args: RenderArgs,
    model: "mujoco.MjModel",
    camera: Camera | list[Camera],
    device: str | torch.device = "cpu",
    size: int | None = None,
) -> "MujocoRenderer | WarpRenderer":
    """Make the renderer that `args` name. "auto" is OpenGL if there is one in this process, else
    Warp if that is installed. Raises UsageError as the renderers do."""
    look = model, size or args.render_size, camera, args.render_quality
    kind = args.renderer
    if kind == "auto":
        try:
            gl_renderer()
        except UsageError:
            kind = "warp" if importlib.util.find_spec("mujoco_warp") else kind
    return WarpRenderer(*look, device) if kind == "warp" else MujocoRenderer(*look)


@contextlib.contextmanager
def quiet_stderr():
    """Drop what this process, libraries in C included, writes to stderr."""
    with open(os.devnull, "wb") as nothing:
        stderr = os.dup(2)
        os.dup2(nothing.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


class WarpRenderer:
    """Draw MuJoCo states without stepping.

    Args:
        model, size, camera, quality: as of `egl_render.MujocoRenderer`. "full" draws shadows, and
            "auto" does on a GPU.
        device: where, "cpu" or "cuda:i".
    Raises UsageError if mujoco_warp is not installed or does not know a feature of the model.
    """

    def __init__(
        self,
        model: "mujoco.MjModel",
        size: int = 480,
        camera: Camera | list[Camera] = PAPER_CAMERA,
        quality: str = "auto",
        device: str | torch.device = "cpu",
    ) -> None:
        import mujoco

        try:
            import mujoco_warp
            import warp
        except ImportError as error:
            raise UsageError(f"--renderer warp needs MuJoCo Warp: {INSTALL_WARP}") from error
        warp.config.log_level = warp.LOG_WARNING
        with quiet_stderr() if str(device) == "cpu" else contextlib.nullcontext():
            warp.init()  # which complains where there is no CUDA driver
        if quality not in ("auto", "full", "light"):
            raise ValueError(f"quality must be auto, full or light, not {quality!r}")
        self.warp, self.mjw, self.device = warp, mujoco_warp, torch.device(device)
        full = quality == "full" or (quality == "auto" and self.device.type == "cuda")
        self.look = f"warp, {'full' if full else 'light'} quality"
        self.description = f"MuJoCo Warp on {device}"
        several = [len(camera)] if isinstance(camera, list) else []
        self.cameras = camera if isinstance(camera, list) else [camera]
        self.frame_shape = (*several, size, size, 3)
        self.size, self.nq, self.nv = size, model.nq, model.nv
        self.worlds = max(1, min(64, PIXELS // size**2))
        self.extent = float(model.stat.extent)
        model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON  # it has no PGS; nothing is solved here
        with self._on_device():
            try:
                self.model = mujoco_warp.put_model(model)
            except NotImplementedError as error:
                raise UsageError(f"--renderer warp: {first_line(error)}") from error
            self.data = mujoco_warp.make_data(model, nworld=self.worlds, nconmax=1, njmax=1)
            self.context = mujoco_warp.create_render_context(
                model, self.worlds, cam_active=[], use_shadows=full, render_skybox=True
            )
            self.rays = [self._aim(model, camera) for camera in self.cameras]

    def _on_device(self):
        """Let Warp work on this device, on a GPU in one queue with torch."""
        if self.device.type == "cpu":
            return self.warp.ScopedDevice("cpu")
        stream = torch.cuda.current_stream(self.device)
        return self.warp.ScopedStream(self.warp.stream_from_torch(stream))

    def _aim(self, model, camera):
        """Give the context one camera, and return its rays. Not every model has a camera, so it is
        that of a model which has nothing else."""
        import mujoco

        fixed = camera.fixed_id >= 0
        fovy = model.cam_fovy[camera.fixed_id] if fixed else model.vis.global_.fovy
        spec = mujoco.MjSpec()
        spec.worldbody.add_camera(fovy=fovy)
        size = [(self.size, self.size)]
        aimed = self.mjw.create_render_context(spec.compile(), self.worlds, size, True, True, False)
        outputs = "rgb_data rgb_adr render_rgb depth_data depth_adr render_depth seg_adr render_seg"
        for name in f"nrender cam_res cam_id_map ray_offset total_rays {outputs}".split():
            setattr(self.context, name, getattr(aimed, name))
        return aimed.ray

    def draw(self, states: np.ndarray) -> torch.Tensor:
        """Draw `states` [B, nq + nv] float64, qpos and qvel -> [B, *frame_shape] uint8, a tensor on
        the device. Raises ValueError for other columns."""
        states = np.asarray(states, np.float64)
        if states.ndim != 2 or states.shape[1] != self.nq + self.nv:
            raise ValueError(f"states must be [B, {self.nq + self.nv}], not {states.shape}")
        qpos = torch.from_numpy(states[:, : self.nq].astype(np.float32)).to(self.device)
        frames = torch.empty((len(qpos), *self.frame_shape), dtype=torch.uint8, device=self.device)
        with self._on_device():
            for some, out in zip(qpos.split(self.worlds), frames.split(self.worlds), strict=True):
                self.data.nworld = len(some)
                self.warp.to_torch(self.data.qpos)[: len(some)] = some
                out[:] = torch.stack(self._views(), 1).view(out.shape)
        return frames

    def _views(self):
        """Draw the states in `data` -> for each camera, pictures [B, H, W, 3] uint8."""
        mjw, wp, model, data, context = self.mjw, self.warp, self.model, self.data, self.context
        for place in (mjw.kinematics, mjw.com_pos, mjw.camlight, mjw.flex):
            place(model, data)
        mjw.refit_bvh(model, data, context)
        own, views = (data.cam_xpos, data.cam_xmat), []
        for camera, context.ray in zip(self.cameras, self.rays, strict=True):
            where, turned = self._pose(camera)
            data.cam_xpos = wp.from_torch(where[:, None].contiguous(), dtype=wp.vec3)
            data.cam_xmat = wp.from_torch(turned[:, None].contiguous(), dtype=wp.mat33)
            mjw.render(model, data, context)
            data.cam_xpos, data.cam_xmat = own
            shape = data.nworld, self.size, self.size
            packed = wp.to_torch(context.rgb_data.view(wp.int32))[: data.nworld]
            colours = packed.view(torch.uint8).view(*shape, 4)[..., [2, 1, 0]]
            depth = wp.to_torch(context.depth_data)[: data.nworld].view(shape)
            views.append(self._fade(colours, depth, camera))
        return views

    def _pose(self, camera):
        """Return the position [B, 3] and rotation [B, 3, 3] of a camera in the world, for
        a free one as mjv_updateCamera computes them."""
        if camera.fixed_id >= 0:
            poses = self.data.cam_xpos, self.data.cam_xmat
            return [self.warp.to_torch(pose)[:, camera.fixed_id] for pose in poses]
        places = self.warp.to_torch(self.data.xpos)[: self.data.nworld]
        lookat = torch.tensor(camera.lookat, dtype=torch.float32, device=self.device).repeat(len(places), 1)
        if camera.track_body >= 0:
            lookat[:, :2] = places[:, camera.track_body, :2]
        azimuth, elevation = np.radians([camera.azimuth, camera.elevation])
        level = np.array([np.cos(azimuth), np.sin(azimuth), 0])
        forward = np.cos(elevation) * level + [0, 0, np.sin(elevation)]
        right = np.array([level[1], -level[0], 0])
        axes = np.stack([right, np.cross(right, forward), -forward], 1)
        turned = torch.tensor(axes, dtype=torch.float32, device=self.device)
        return lookat + camera.distance * turned[:, 2], turned.repeat(len(places), 1, 1)

    def _fade(self, colours, depth, camera):
        """Fade what is far away to its mean colour in the picture: with one sample a pixel, texels
        that are smaller than a pixel would flicker whenever the camera moves."""
        near = NEAR * (self.extent if camera.fixed_id >= 0 else camera.distance)
        near *= (self.size / 64) ** 0.5
        share = ((depth / near - 1) / (FAR / NEAR - 1)).clamp(0, 1)[..., None]
        images = colours.float()
        total = (images * share).sum((1, 2), keepdim=True)
        mean = total / share.sum((1, 2), keepdim=True).clamp_min(1e-6)
        return torch.lerp(images, mean, share).round().byte()

    def render(self, states: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """`draw` into `out` [B, *frame_shape] uint8 on the host, allocated when None -> out."""
        frames = self.draw(states).cpu().numpy()
        if out is None:
            return frames
        out[:] = frames
        return out

    def close(self) -> None:
        """Do nothing: Warp frees what is not used any more."""
