"""MuJoCo's pictures without OpenGL: MuJoCo Warp casts rays on the device where CLIP runs.

    renderer = WarpRenderer(model, size=480, camera=egl_render.PAPER_CAMERA, device="cuda:0")
    renderer.draw(states)         # [B, S] float64 -> torch [B, H, W, 3] uint8 on that device

The pictures have one sample per pixel, hard shadows, and large floors that fade far away. They lack
reflections and the parts that `egl_render.left_out_by_warp` names.
"""

import os
from typing import Any

import numpy as np
import torch

from clip_reward import UsageError
from egl_render import (
    FLOOR,
    INSTALL_WARP,
    PAPER_CAMERA,
    Camera,
    left_out_by_warp,
    parts_of,
    views_of,
)

NEAR, FAR = 1.2, 2.5  # floors fade between these multiples of the camera's distance (at 64 px)


class WarpRenderer:
    """Draw MuJoCo states without stepping. A machine's first renderer compiles for ten seconds.

    Args:
        model, size, camera: as for `egl_render.MujocoRenderer`.
        device: where to draw, "cpu" or "cuda:i".
    Raises UsageError if mujoco_warp is not installed, or does not work here.
    """

    look = "warp"

    def __init__(
        self,
        model: Any,
        size: int = 480,
        camera: Camera | list[Camera] = PAPER_CAMERA,
        device: str | torch.device = "cpu",
    ) -> None:
        import mujoco

        try:
            import mujoco_warp
            import warp
        except ImportError as error:
            raise UsageError(f"--renderer warp needs MuJoCo Warp: {INSTALL_WARP}") from error
        self.cameras, self.frame_shape = views_of(size, camera)
        self.warp, self.mjw, self.device = warp, mujoco_warp, torch.device(device)
        left_out = left_out_by_warp(model)
        self.description = f"MuJoCo Warp on {device}" + (left_out and f", without {left_out}")
        self.host_model, self.size = model, size
        self.worlds = max(1, min(64, 2**22 // size**2))  # states that are drawn at once
        if model.nflex:  # with fewer states than worlds, Warp 1.19 reads beyond its arrays
            self.worlds = 1
        model.opt.solver = mujoco.mjtSolver.mjSOL_NEWTON  # Warp has no PGS; nothing is solved here
        warp.config.log_level = warp.LOG_WARNING
        self._start(warp)
        plane = model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE
        half = model.geom_size[:, :2].min(1)  # m, 0: endless
        self.floors = np.flatnonzero(plane & ((half == 0) | (half >= FLOOR))).tolist()
        with self._on_device():
            self.model = mujoco_warp.put_model(model)
            self.data = mujoco_warp.make_data(model, nworld=self.worlds, nconmax=1, njmax=1)
            self.context = mujoco_warp.create_render_context(
                model, self.worlds, cam_active=[], use_shadows=True, render_skybox=True
            )
            self.rays = [self._aim(mujoco.MjSpec(), model, camera) for camera in self.cameras]

    def _start(self, warp):
        """Start Warp. Raises UsageError if it finds no CUDA or may not write its kernels."""
        with open(os.devnull, "wb") as nothing, os.fdopen(os.dup(2), "wb") as stderr:
            os.dup2(nothing.fileno(), 2)
            try:
                warp.init()  # its C code prints a complaint if there is no CUDA
                folder = warp.config.kernel_cache_dir
                if not os.access(folder, os.W_OK):
                    raise PermissionError(f"{folder} is read-only")
            except OSError as error:
                ways = "set WARP_CACHE_PATH to a writable folder"
                raise UsageError(f"MuJoCo Warp cannot save kernels ({error}); {ways}") from error
            finally:
                os.dup2(stderr.fileno(), 2)
        if self.device.type == "cuda" and not warp.is_cuda_available():
            versions = warp.get_cuda_toolkit_version(), warp.get_cuda_driver_version()
            need, has = (".".join(map(str, version or ["none"])) for version in versions)
            problem = f"Warp {warp.config.version} needs CUDA {need}, but the driver has {has}"
            raise UsageError(f"{problem}; update the driver, or draw with --renderer egl")

    def _on_device(self):
        """Make Warp work on this device, and on a GPU in torch's stream."""
        if self.device.type == "cpu":
            return self.warp.ScopedDevice("cpu")
        stream = torch.cuda.current_stream(self.device)
        return self.warp.ScopedStream(self.warp.stream_from_torch(stream))

    def _aim(self, spec, model, camera):
        """Give the context one camera and return its rays. Not every model has a camera, so this
        one is made in an empty model, `spec`."""
        fixed = camera.fixed_id >= 0
        fovy = model.cam_fovy[camera.fixed_id] if fixed else model.vis.global_.fovy
        spec.worldbody.add_camera(fovy=fovy)
        spec.worldbody.add_geom(size=[1, 1, 1])  # Warp crashes on a GPU if there is nothing to draw
        size, make = [(self.size, self.size)], self.mjw.create_render_context
        aimed = make(spec.compile(), self.worlds, size, True, True, True)
        outputs = "rgb_data rgb_adr render_rgb depth_data depth_adr render_depth"
        outputs += " seg_data seg_adr render_seg"
        for name in f"nrender cam_res cam_id_map ray_offset total_rays {outputs}".split():
            setattr(self.context, name, getattr(aimed, name))
        return aimed.ray

    def draw(self, states: np.ndarray) -> torch.Tensor:
        """Draw `states` [B, S] float64 -> [B, *frame_shape] uint8, a tensor on the device. Raises
        ValueError for another number of columns."""
        qpos, _, *mocap = parts_of(states, self.host_model)
        parts = [
            torch.from_numpy(part.astype(np.float32)).to(self.device) for part in (qpos, *mocap)
        ]
        shape = len(states), *self.frame_shape
        frames = torch.empty(shape, dtype=torch.uint8, device=self.device)
        rings = self.data.qpos, self.data.mocap_pos, self.data.mocap_quat
        with self._on_device():
            for i in range(0, len(states), self.worlds):
                out = frames[i : i + self.worlds]
                self.data.nworld = len(out)
                for ring, part in zip(rings, parts, strict=True):
                    if part.shape[1]:  # the model may have no mocap bodies
                        self.warp.to_torch(ring)[: len(out)] = part[i : i + self.worlds]
                out[:] = torch.stack(self._views(), 1).view(out.shape)
        return frames

    def _views(self):
        """Draw the states in `data` -> for each camera, pictures [B, H, W, 3] uint8."""
        mjw, wp, model, data, context = self.mjw, self.warp, self.model, self.data, self.context
        for place in (mjw.kinematics, mjw.com_pos, mjw.camlight, mjw.flex):
            place(model, data)
        mjw.refit_bvh(model, data, context)
        own, shape, views = (data.cam_xpos, data.cam_xmat), (data.nworld, self.size, self.size), []
        for camera, context.ray in zip(self.cameras, self.rays, strict=True):
            position, axes = self._pose(camera)
            data.cam_xpos = wp.from_torch(position[:, None].contiguous(), dtype=wp.vec3)
            data.cam_xmat = wp.from_torch(axes[:, None].contiguous(), dtype=wp.mat33)
            mjw.render(model, data, context)
            data.cam_xpos, data.cam_xmat = own
            packed = wp.to_torch(context.rgb_data.view(wp.int32))[: data.nworld]
            colours = packed.view(torch.uint8).view(*shape, 4)[..., :3].flip(-1)  # from BGRA
            depth = wp.to_torch(context.depth_data)[: data.nworld].view(shape)
            hit, kind = wp.to_torch(context.seg_data)[: data.nworld].view(*shape, 2).unbind(-1)
            geom = hit.where(kind == int(mjw.ObjType.GEOM), -1)  # cloths have ids, too
            views.append(self._fade(colours.float(), depth, geom, camera).byte())
        return views

    def _pose(self, camera):
        """Return the position [B, 3] and axes [B, 3, 3] of a camera in the world."""
        count, places = self.data.nworld, self.warp.to_torch(self.data.xpos)
        if camera.fixed_id >= 0:
            poses = self.data.cam_xpos, self.data.cam_xmat
            return [self.warp.to_torch(pose)[:count, camera.fixed_id] for pose in poses]
        lookat = torch.tensor(camera.lookat).to(places).repeat(count, 1)
        axes = torch.from_numpy(camera.axes).to(places).repeat(count, 1, 1)
        if camera.track_body >= 0:
            lookat[:, :2] = places[:count, camera.track_body, :2]
        return lookat + camera.distance * axes[:, :, 2], axes

    def _fade(self, images, depth, geom, camera):
        """Fade the distant part of large floors in `images` [B, H, W, 3] to their mean colour: with
        one sample per pixel, texels that are smaller than a pixel would flicker whenever the
        camera moves."""
        near = camera.distance
        if camera.fixed_id >= 0:
            near = np.linalg.norm(self.host_model.cam_poscom0[camera.fixed_id])
        near *= NEAR * (self.size / 64) ** 0.5
        far = (256 * (depth / near - 1) / (FAR / NEAR - 1)).clamp(0, 256).floor()
        for floor in self.floors:
            share = (far * (geom == floor))[..., None]
            # the sum of whole numbers in double precision does not depend on their order
            total = (images * share).sum((1, 2), keepdim=True, dtype=torch.float64)
            mean = total / share.sum((1, 2), keepdim=True, dtype=torch.float64).clamp_min(1)
            images = images.lerp_(mean.float(), share / 256).round_()
        return images

    def render(self, states: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy what `draw` returns to `out` [B, *frame_shape] uint8, new if it is None -> out."""
        out = np.empty((len(states), *self.frame_shape), np.uint8) if out is None else out
        out[:] = self.draw(states).cpu().numpy()
        return out

    def close(self) -> None:
        """Do nothing: Warp frees what is no longer used."""
