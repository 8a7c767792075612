"""Pictures: which GL draws them, states -> frames, the realistic scenes, videos.

    import egl_render
    egl_render.setup_gl("cuda:0")                       # before mujoco is imported
    model = egl_render.textured_model(xml_path)         # sky, stone floor, pale metal body
    renderer = egl_render.MujocoRenderer(model, size=480, camera=egl_render.PAPER_CAMERA)
    renderer.render(states, out)                        # [B, nq+nv] float64 -> [B, H, W, 3] uint8

    renderer = egl_render.ClassicRenderer("MountainCar-v0", size=480, textured=True)  # no GL

mujoco reads MUJOCO_GL when it is imported, so this module imports it inside functions only.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import importlib
import io
import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# ------------------------------------------------------------------------------ GL backend

INSTALL_GL = "apt-get update && apt-get install -y libegl1 libgl1-mesa-dri libgles2"

EGL_PLATFORM_DEVICE_EXT = 0x313F
EGL_CUDA_DEVICE_NV = 0x323A
EGL_EXTENSIONS = 0x3055


class GLError(RuntimeError):
    """No usable OpenGL, or one that was chosen too late. The message says what to type."""


def _egl_devices():
    """EGL's devices, in EGL's order: list of (CUDA index or None, software: True, False, or None
    for a device that does not initialise).

    EGL and CUDA number the GPUs of a host differently; the extension EGL_NV_device_cuda tells which
    CUDA device an EGL device is, EGL_MESA_device_software which one is the CPU.
    """
    # Mesa and triton (which torchvision pulls in) each bring an LLVM. Loading triton's second ends
    # in a segmentation fault, loading it first does not.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton._C.libtriton")
    try:
        egl = ctypes.CDLL(ctypes.util.find_library("EGL") or "libEGL.so.1")
        egl.eglGetProcAddress.restype = ctypes.c_void_p
        egl.eglInitialize.argtypes = [ctypes.c_void_p] * 3

        def extension(name, restype, *argtypes):
            address = egl.eglGetProcAddress(name.encode())
            if not address:
                raise OSError(f"EGL has no {name}")
            return ctypes.CFUNCTYPE(restype, *argtypes)(address)

        void_p, int_p = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
        query_devices = extension(
            "eglQueryDevicesEXT", ctypes.c_uint, ctypes.c_int, ctypes.POINTER(void_p), int_p
        )
        query_attribute = extension(
            "eglQueryDeviceAttribEXT",
            ctypes.c_uint,
            void_p,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_ssize_t),
        )
        query_string = extension("eglQueryDeviceStringEXT", ctypes.c_char_p, void_p, ctypes.c_int)
        get_display = extension("eglGetPlatformDisplayEXT", void_p, ctypes.c_uint, void_p, void_p)
    except OSError:
        return []
    handles, count = (void_p * 64)(), ctypes.c_int()
    if not query_devices(64, handles, ctypes.byref(count)):
        return []
    devices = []
    for index in range(count.value):
        display = get_display(EGL_PLATFORM_DEVICE_EXT, handles[index], None)
        usable = display and egl.eglInitialize(display, None, None)
        cuda = ctypes.c_ssize_t(-1)
        known = query_attribute(handles[index], EGL_CUDA_DEVICE_NV, ctypes.byref(cuda))
        extensions = query_string(handles[index], EGL_EXTENSIONS) or b""
        software = b"EGL_MESA_device_software" in extensions if usable else None
        devices.append((cuda.value if known and cuda.value >= 0 else None, software))
    return devices


def choose_gl(device="cpu"):
    """Pick the GL backend for a torch device. Quick: sets no variable and creates no context.

    Args:
        device: "cpu" or "cuda:i" (or anything `str()` of which is that).
    Returns:
        (environment, description): the variables to set before mujoco is imported, and one line on
        what will draw. In order of preference: EGL on the GPU that CUDA device i is, EGL in
        software, OSMesa (software). On macOS, MuJoCo's own default.
    Raises:
        GLError: nothing works; the message has the command that fixes it.
    """
    if sys.platform == "darwin":
        return {}, "CGL (macOS)"
    # MuJoCo's MUJOCO_EGL_DEVICE_ID counts the GPUs that CUDA knows first, by CUDA's numbers
    devices = sorted(_egl_devices(), key=lambda found: math.inf if found[0] is None else found[0])
    usable = [(i, *found) for i, found in enumerate(devices) if found[1] is not None]
    warning = ""
    if str(device).startswith("cuda"):
        wanted = int(str(device).partition(":")[2] or 0)
        for _, cuda, _ in usable:
            if cuda == wanted:
                return _egl(wanted), f"EGL on the GPU (cuda:{wanted})"
        warning = f"; WARNING: no EGL device belongs to {device}"
    if usable:  # a CPU worker draws in software, or on whatever else there is
        position, cuda, software = min(usable, key=lambda found: not found[2])
        where = "in software (Mesa)" if software else "on the GPU"
        return _egl(position), f"EGL {where}{warning}"
    if ctypes.util.find_library("OSMesa"):
        return {"MUJOCO_GL": "osmesa", "PYOPENGL_PLATFORM": "osmesa"}, "OSMesa (software)"
    raise GLError(f"no OpenGL library to draw with (neither EGL nor OSMesa); type: {INSTALL_GL}")


def _egl(device_id):
    return {
        "MUJOCO_GL": "egl",
        "PYOPENGL_PLATFORM": "egl",
        "MUJOCO_EGL_DEVICE_ID": str(device_id),
    }


def setup_gl(device="cpu"):
    """Choose the GL backend for `device` and tell mujoco, best before mujoco is imported.

    mujoco makes its own choice while it is imported; where that came first, it is put right here.
    Software draws in the calling thread, unless LP_NUM_THREADS says how many Mesa shall start.

    Returns:
        One line on what will draw, e.g. "EGL in software (Mesa)".
    Raises:
        GLError: no GL library, or PyOpenGL was imported before for another backend.
    """
    # Mesa reads this when EGL initialises. Handing a small picture to other threads costs more than
    # they save: 64 px in light quality take 1.3 times the CPU time with Mesa's two threads.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    environment, description = choose_gl(device)
    wanted, has = environment.get("MUJOCO_GL"), os.environ.get("MUJOCO_GL")
    if wanted != has and "OpenGL" in sys.modules:
        raise GLError(
            f"PyOpenGL was imported with MUJOCO_GL={has} before setup_gl({str(device)!r}) could "
            f"choose {wanted}; import it later, or set MUJOCO_GL={wanted} in the shell"
        )
    os.environ.update(environment)
    if wanted != has and "mujoco" in sys.modules:
        context = importlib.import_module(f"mujoco.{wanted}").GLContext
        for name in ("mujoco.gl_context", "mujoco.rendering.classic.gl_context"):
            if name in sys.modules:
                sys.modules[name].GLContext = context
    return description


def is_software(description):
    """True if `setup_gl`'s description names a renderer that runs on the CPU."""
    return "software" in description


# ------------------------------------------------------------------------------ cameras


@dataclass(frozen=True)
class Camera:
    """Where the picture is taken from. Angles in degrees, lengths in metres, as in MuJoCo's
    mjvCamera. `track_body` >= 0: lookat's x and y are those of that body, its z stays."""

    distance: float
    azimuth: float
    elevation: float
    lookat: tuple[float, float, float] = (0.0, 0.0, 0.0)
    track_body: int = -1
    fixed_id: int = -1  # >= 0: a camera of the model's own; the rest is ignored


# The humanoid's camera in the paper (section 4.3 and its appendix): tracks the torso, body 1.
PAPER_CAMERA = Camera(3.5, 180.0, -10.0, (0.0, 0.0, 1.0), track_body=1)


def env_camera(env):
    """The camera that a Gymnasium MuJoCo environment's own `render()` uses, as a `Camera`.

    Gymnasium looks at the median of the geoms of whatever state is drawn first unless the task
    says otherwise; here it is the median at qpos0, so that every worker sees from the same place.
    """
    import mujoco

    env = env.unwrapped
    viewer = env.mujoco_renderer
    if viewer.camera_id is not None and viewer.camera_id >= 0:
        return Camera(0.0, 0.0, 0.0, fixed_id=viewer.camera_id)
    data = mujoco.MjData(env.model)
    mujoco.mj_kinematics(env.model, data)
    config = viewer.default_cam_config or {}
    free = mujoco.MjvCamera()  # MuJoCo's defaults for the angles
    tracks = config.get("type") == mujoco.mjtCamera.mjCAMERA_TRACKING
    return Camera(
        distance=float(config.get("distance", env.model.stat.extent)),
        azimuth=float(config.get("azimuth", free.azimuth)),
        elevation=float(config.get("elevation", free.elevation)),
        lookat=tuple(map(float, config.get("lookat", np.median(data.geom_xpos, axis=0)))),
        track_body=int(config.get("trackbodyid", -1)) if tracks else -1,
    )


# ------------------------------------------------------------------------------ renderer

QUALITIES = ("full", "light")


@dataclass(frozen=True)
class Light:
    """What light quality draws. benchmarks/rendering.py measures what each of these costs and what
    it does to the reward: in software the time goes into shadow maps, reflections, multisampling
    and vertices, the floor's above all. Without the first three, at 64 px in CPU time, MuJoCo's
    floor costs 3.7 ms a frame and this one 0.9, and the rewards are the same."""

    shadowsize: int = 0  # px of the shadow map, 0: no shadows (MuJoCo's default: 4096)
    samples: int = 0  # a pixel (4)
    slices: int = 14  # facets around a capsule or sphere (28), as tiny_clip was trained with
    stacks: int = 8  # facets along it (16)
    floor_cells: int | None = 20  # squares along a plane's side, None: MuJoCo's (up to 200)


LIGHT = Light()


def _coarsen_planes(model, cells):
    """Give the planes of `model` at most `cells` squares a side, and infinite ones a size.

    MuJoCo draws an infinite plane as 200 x 200 squares, and in software these vertices are most of
    a small frame's work. It bakes them into its GL context, so the model needs the sizes only
    while that is made. MuJoCo keeps an infinite plane's middle near the camera.
    """
    import mujoco

    sight = 2 * model.vis.map.zfar * model.stat.extent  # so far that no corner is ever seen
    for geom in np.flatnonzero(model.geom_type == mujoco.mjtGeom.mjGEOM_PLANE):
        size, material = model.geom_size[geom], model.geom_matid[geom]
        for axis in np.flatnonzero(size[:2] <= 0):
            # The texture of a finite plane starts at its corner, that of an infinite one in its
            # middle: the same pattern where half a side is an odd number of repeats.
            repeat = model.mat_texrepeat[material, axis] if material >= 0 else 0
            tile = 1 / repeat if repeat > 0 else sight
            size[axis] = tile * (2 * math.ceil(sight / tile / 2) + 1)
        size[2] = max(size[2], 2 * size[:2].max() / cells)


class MujocoRenderer:
    """Draws MuJoCo states without stepping; what it draws is what `env.render()` draws.

    Args:
        model: compiled mujoco.MjModel. Its visual quality is changed in place by `quality`.
        size: height and width of the frames in pixels.
        camera: a `Camera`; see `env_camera` and `PAPER_CAMERA`.
        quality: "full" leaves the model's own settings (MuJoCo's default: 4096 px shadow map, 4
            samples a pixel). "light" is for software GL: `LIGHT`.
    """

    def __init__(self, model, size=480, camera=PAPER_CAMERA, quality="full"):
        import mujoco

        if quality not in QUALITIES:
            raise ValueError(f"quality must be one of {QUALITIES}, not {quality!r}")
        self._mujoco = mujoco
        self.model, self.camera, self.frame_shape = model, camera, (size, size, 3)
        self.data = mujoco.MjData(model)
        self._nq, self._state_size = model.nq, model.nq + model.nv
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, size)
        model.vis.global_.offheight = max(model.vis.global_.offheight, size)
        kept = model.geom_size.copy()
        if quality == "light":
            model.vis.quality.shadowsize = LIGHT.shadowsize
            model.vis.quality.offsamples = LIGHT.samples
            model.vis.quality.numslices = LIGHT.slices
            model.vis.quality.numstacks = LIGHT.stacks
            model.mat_reflectance[:] = 0
            if LIGHT.floor_cells:
                _coarsen_planes(model, LIGHT.floor_cells)
        drawn = model.geom_size.copy()
        self._renderer = mujoco.Renderer(model, size, size, max_geom=1000)
        model.geom_size[:] = kept
        self._resized = []  # (the scene's geom of an infinite plane, the size to draw it with)
        if quality == "light":
            scene = self._renderer.scene
            scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = LIGHT.shadowsize > 0
            self._renderer.update_scene(self.data)
            for geom in scene.geoms[: scene.ngeom]:
                index = geom.objid
                if geom.type == mujoco.mjtGeom.mjGEOM_PLANE and not kept[index, :2].all():
                    self._resized.append((geom, drawn[index]))
        self._view = mujoco.MjvCamera()
        if camera.fixed_id >= 0:
            self._view.type = mujoco.mjtCamera.mjCAMERA_FIXED
            self._view.fixedcamid = camera.fixed_id
        else:
            self._view.type = mujoco.mjtCamera.mjCAMERA_FREE
            self._view.distance = camera.distance
            self._view.azimuth = camera.azimuth
            self._view.elevation = camera.elevation
            self._view.lookat[:] = camera.lookat

    def render(self, states, out=None):
        """Draw a batch of states.

        Args:
            states: [B, nq + nv] float64, qpos and qvel.
            out: [B, H, W, 3] uint8, C-contiguous, written in place; allocated when None.
        Returns:
            out
        Raises:
            ValueError: wrong number of columns in `states`.
        """
        states = np.asarray(states, dtype=np.float64)
        if states.ndim != 2 or states.shape[1] != self._state_size:
            raise ValueError(f"states must be [B, {self._state_size}], not {states.shape}")
        if out is None:
            out = np.empty((len(states), *self.frame_shape), np.uint8)
        mujoco, model, data = self._mujoco, self.model, self.data
        for state, frame in zip(states, out, strict=True):
            data.qpos[:] = state[: self._nq]
            data.qvel[:] = state[self._nq :]
            # the part of mj_forward that a picture shows: positions, cameras, lights, tendons
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)
            mujoco.mj_camlight(model, data)
            mujoco.mj_flex(model, data)
            mujoco.mj_tendon(model, data)
            if self.camera.track_body >= 0:
                self._view.lookat[:2] = data.xpos[self.camera.track_body, :2]
            # MuJoCo centres infinite planes below the camera that the scene has: this picture's, or
            # a pixel would depend on which picture was drawn before
            mujoco.mjv_updateCamera(model, data, self._view, self._renderer.scene)
            self._renderer.update_scene(data, self._view)
            for geom, size in self._resized:
                geom.size = size
            self._renderer.render(out=frame)
        return out

    def close(self):
        """Free the GL context."""
        self._renderer.close()


# ------------------------------------------------------------------------------ realistic scene


def fractal_noise(rng, size, beta=1.7, cutoff=1.0):
    """[size, size] float64 in [0, 1]: periodic noise with a 1/f^beta amplitude spectrum, made in
    the Fourier domain; wavelengths above 1/cutoff of the tile are left out."""
    frequency = np.hypot(*np.meshgrid(*[np.fft.fftfreq(size, 1 / size)] * 2))
    spectrum = np.fft.fft2(rng.standard_normal((size, size)))
    spectrum *= (frequency >= cutoff) / np.maximum(frequency, 1.0) ** beta
    noise = np.real(np.fft.ifft2(spectrum))
    low, high = np.quantile(noise, [0.01, 0.99])
    return np.clip((noise - low) / (high - low), 0.0, 1.0)


def _mix(a, b, weight):
    weight = np.asarray(weight)[..., None]
    return np.asarray(a) * (1 - weight) + np.asarray(b) * weight


def _smoothstep(x, low, high):
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return t * t * (3 - 2 * t)


def _bytes(rgb):
    return (np.clip(rgb, 0.0, 1.0) * 255).astype(np.uint8)


def stone_texture(rng, size=1024, tint=(0.60, 0.575, 0.53), rows=6):
    """[size, size, 3] uint8: periodic weathered flagstones in irregular courses."""
    wobble = size * 0.004
    y, x = np.mgrid[:size, :size].astype(float)
    x += wobble * (fractal_noise(rng, size, 1.4, 8) - 0.5) * 2
    y += wobble * (fractal_noise(rng, size, 1.4, 8) - 0.5) * 2
    cuts_y = (np.arange(rows) + rng.uniform(-0.15, 0.15, rows)) * size / rows
    row = (np.searchsorted(cuts_y, y.ravel() % size).reshape(y.shape) - 1) % rows
    edge = np.abs((y[..., None] - cuts_y + size / 2) % size - size / 2).min(-1)
    tone = np.zeros((size, size))
    for index in range(rows):
        columns = rng.integers(rows - 2, rows + 1)
        cuts_x = np.sort(
            (np.arange(columns) + rng.uniform(-0.3, 0.3, columns)) * size / columns
            + rng.uniform(0, size)
        )
        mask = row == index
        inside = x[mask] % size
        slab = np.searchsorted(np.sort(cuts_x % size), inside) % columns
        tone[mask] = rng.uniform(-1, 1, columns)[slab]
        distance = np.abs((inside[:, None] - cuts_x + size / 2) % size - size / 2).min(-1)
        edge[mask] = np.minimum(edge[mask], distance)
    stain = fractal_noise(rng, size, 1.6, 2)
    grain = fractal_noise(rng, size, 0.6, 16)
    light = 1.0 + 0.11 * tone + 0.28 * (stain - 0.5) + 0.26 * (grain - 0.5)
    color = np.asarray(tint) * light[..., None]
    color += 0.03 * tone[..., None] * np.array([1.0, 0.2, -0.8])  # warm and cold slabs
    moss = _smoothstep(fractal_noise(rng, size, 1.5, 3), 0.62, 0.95) * 0.35
    color = _mix(color, (0.36, 0.38, 0.27), moss)
    joint = 1.0 - _smoothstep(edge, size * 0.002, size * 0.007)
    return _bytes(_mix(color, (0.24, 0.225, 0.20), joint * 0.8))


def metal_texture(rng, size=128, tint=(0.86, 0.87, 0.89)):
    """[size, size, 3] uint8: pale brushed metal with faint wear."""
    brushed = np.repeat(rng.standard_normal((size, 1)), size, 1)
    wear = fractal_noise(rng, size, 1.3, 2)
    light = 1.0 + 0.02 * brushed + 0.12 * (wear - 0.5)
    return _bytes(np.asarray(tint) * light[..., None])


def sky_texture(rng, size=512, cover=0.5, haze=(0.80, 0.86, 0.91), zenith=(0.22, 0.43, 0.74)):
    """[6 * size, size, 3] uint8: a cloudy sky over distant hills, as MuJoCo's six skybox faces
    (right, left, up, down, front, back), seamless because the colour is one function of the
    direction. cover is the share of the sky under clouds, 0 to 1."""
    haze, zenith = np.asarray(haze), np.asarray(zenith)
    clouds = fractal_noise(rng, 512, 1.55, 2)
    ridge = 0.03 + 0.07 * np.interp(np.arange(0, 512, 0.25), np.arange(512), clouds[0], period=512)
    v, u = (np.mgrid[:size, :size] + 0.5) / size * 2 - 1
    one = np.ones_like(u)
    # Directions of each face's pixels, row 0 at the face's top, z up. MuJoCo shows the faces as if
    # seen from outside, so this is the world in a mirror (y to -y).
    faces = {
        "right": (one, -u, -v),
        "left": (-one, u, -v),
        "up": (u, v, one),
        "down": (u, -v, -one),
        "front": (u, one, -v),
        "back": (-u, -one, -v),
    }
    pictures = []
    for x, y, z in faces.values():
        norm = np.sqrt(x * x + y * y + z * z)
        x, y, z = x / norm, y / norm, z / norm
        up = np.clip(z, 0, 1)
        color = _mix(haze, zenith, _smoothstep(up, -0.05, 0.75))
        # clouds lie on a plane overhead: perspective makes them denser towards the horizon
        scale = 70.0 / (up + 0.18)
        column, line = x * scale, y * scale
        density = _smoothstep(_sample(clouds, line, column), 1.0 - cover - 0.22, 1.0 - cover + 0.3)
        shade = 0.80 + 0.20 * _sample(clouds, line + 9, column + 6)
        cloud = np.stack([shade, shade, shade + 0.01], -1)
        color = _mix(color, cloud, density * _smoothstep(up, 0.0, 0.14) * 0.9)
        azimuth = (np.arctan2(y, x) / (2 * np.pi) * 2048).astype(int)
        for height, tone in ((1.0, (0.70, 0.78, 0.85)), (0.6, (0.52, 0.60, 0.60))):
            hill = _smoothstep(height * ridge[(azimuth + int(900 * height)) % 2048] - z, 0, 0.004)
            color = _mix(color, haze * tone, hill * 0.85)
        color = _mix(color, haze * 0.93, _smoothstep(-z, -0.015, 0.02))
        pictures.append(_bytes(color))
    return np.concatenate(pictures)


def _sample(image, line, column):
    """Bilinear, periodic look-up of [H, W] at float coordinates."""
    height, width = image.shape
    y0, x0 = np.floor(line).astype(int), np.floor(column).astype(int)
    fy, fx = line - y0, column - x0
    y0, x0, y1, x1 = y0 % height, x0 % width, (y0 + 1) % height, (x0 + 1) % width
    top = image[y0, x0] * (1 - fx) + image[y0, x1] * fx
    bottom = image[y1, x0] * (1 - fx) + image[y1, x1] * fx
    return top * (1 - fy) + bottom * fy


def textured_model(xml_path, rng=None):
    """The MuJoCo model at `xml_path` in a realistic scene: cloudy sky, stone floor, a body of pale
    metal with dark joints, sunlight. Only looks change: nothing has mass or collides that had not.

    Args:
        xml_path: a model file, e.g. `env.unwrapped.fullpath` of a Gymnasium task.
        rng: np.random.Generator that varies textures, colours and light (to train on); None is the
            one canonical scene.
    Returns:
        compiled mujoco.MjModel with the physics of the file, bit for bit.
    """
    import mujoco

    vary = rng is not None
    rng = rng or np.random.default_rng(7)  # a fixed seed: everybody's canonical scene is the same

    def around(value, spread):
        value = np.asarray(value, float)
        return value * (1 + rng.uniform(-spread, spread, value.shape)) if vary else value

    haze = around((0.80, 0.86, 0.91), 0.06)
    spec = mujoco.MjSpec.from_file(str(xml_path))
    for texture in list(spec.textures):
        if texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX:
            spec.delete(texture)

    pictures = {}

    def add_texture(name, kind, picture):
        # room is reserved here and filled after compiling: quicker than a list of ten million ints
        height, width = picture.shape[:2]
        flat = mujoco.mjtBuiltin.mjBUILTIN_FLAT
        spec.add_texture(name=name, type=kind, builtin=flat, width=width, height=height)
        pictures[name] = picture

    sky = sky_texture(
        rng, cover=float(around(0.45, 0.6)), haze=haze, zenith=around((0.22, 0.43, 0.74), 0.15)
    )
    add_texture("clip_sky", mujoco.mjtTexture.mjTEXTURE_SKYBOX, sky)
    stone = stone_texture(rng, tint=around(0.56, 0.2) * around((1.07, 1.02, 0.93), 0.05))
    add_texture("clip_stone", mujoco.mjtTexture.mjTEXTURE_2D, stone)
    metal = metal_texture(rng, tint=around(0.88, 0.08) * around((0.985, 0.995, 1.015), 0.02))
    add_texture("clip_metal", mujoco.mjtTexture.mjTEXTURE_CUBE, np.concatenate([metal] * 6))

    def add_material(name, texture=None, repeat=1.0, **look):
        material = spec.add_material(name=name, texrepeat=[repeat, repeat], **look)
        if texture:
            material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = texture
            material.texuniform = True

    tile = float(around(4.0, 0.2))  # metres that one repeat of the flagstones covers
    add_material("clip_stone", "clip_stone", 1 / tile, specular=0.15, shininess=0.2)
    add_material("clip_metal", "clip_metal", 3.0, specular=0.75, shininess=0.55)
    dark = np.append(around((0.16, 0.17, 0.19), 0.2), 1.0)
    add_material("clip_dark", specular=0.6, shininess=0.6)

    for geom in spec.geoms:
        jointed = any(part in geom.name for part in ("waist", "hand", "foot"))
        geom.rgba = dark if jointed else [1.0, 1.0, 1.0, 1.0]
        if geom.type == mujoco.mjtGeom.mjGEOM_PLANE:
            geom.material = "clip_stone"
            geom.size = [0, 0, geom.size[2]]  # drawn to the horizon; contacts never ended anyway
        else:
            geom.material = "clip_dark" if jointed else "clip_metal"
        if geom.name == "head":  # a visor, so that one sees which way the robot faces
            geom.parent.add_geom(
                name="clip_visor",
                type=mujoco.mjtGeom.mjGEOM_ELLIPSOID,
                pos=np.asarray(geom.pos) + [0.042, 0, 0.012],
                size=[0.055, 0.066, 0.03],
                material="clip_dark",
                rgba=dark,
                contype=0,
                conaffinity=0,
                mass=0,
            )

    for light in list(spec.lights):
        spec.delete(light)
    azimuth = np.radians(float(around(-38.0, 0.9)))  # over the paper camera's shoulder
    height = np.radians(float(around(48.0, 0.3)))
    sun = -np.array(
        [np.cos(azimuth) * np.cos(height), np.sin(azimuth) * np.cos(height), np.sin(height)]
    )
    robot = spec.worldbody.first_body()
    robot.add_light(  # travels with the robot, so that it stays inside the shadow map
        name="clip_sun",
        mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM,
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        pos=-8 * sun - np.asarray(robot.pos),
        dir=sun,
        castshadow=True,
        ambient=[0, 0, 0],
        diffuse=around(0.62, 0.2) * np.array([1.0, 0.96, 0.88]),
        specular=[0.4, 0.4, 0.38],
    )
    visual = spec.visual
    visual.headlight.ambient = around(0.42, 0.15) * np.array([0.95, 0.98, 1.05])
    visual.headlight.diffuse = around(0.16, 0.3) * np.ones(3)
    visual.headlight.specular = [0.1, 0.1, 0.1]
    visual.rgba.haze = [*(haze * 0.93), 1.0]
    visual.map.haze = 0.35
    visual.map.shadowclip = 4.0
    model = spec.compile()
    for name, picture in pictures.items():
        start = model.tex_adr[model.texture(name).id]
        model.tex_data[start : start + picture.size] = picture.ravel()
    return model


# ------------------------------------------------------------------------------ classic control

CLASSIC_STATE_SIZES = {"CartPole-v1": 4, "MountainCar-v0": 2, "MountainCarContinuous-v0": 2}
MOUNTAIN_GOALS = {"MountainCar-v0": 0.5, "MountainCarContinuous-v0": 0.45}  # x of the flag


class ClassicRenderer:
    """Draws CartPole and MountainCar states without stepping; needs no display and no OpenGL.

    Plain frames of the native size are those of Gymnasium's own `env.render()`, pixel for pixel
    (tests/test_egl_render.py). They are drawn here because Gymnasium paints everything anew and
    copies it twice, 1.8 to 2.8 ms a frame; here what never moves is painted once.

    Args:
        env_id: one of CLASSIC_STATE_SIZES.
        size: None for Gymnasium's 400 x 600 pixels; otherwise height and width of the frames: the
            native picture is centred in a square (more white, or more sky and meadow: CLIP crops
            its pictures to squares, which would cut off the goal) and scaled smoothly.
        textured: the mountain as a landscape instead of a line (MountainCar only).
        scene: another landscape than the canonical one, from `mountain_scene` (to train on).
    Raises:
        ValueError: unknown env_id, or a texture for CartPole.
    """

    def __init__(self, env_id, size=None, textured=False, scene=None):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # no display needed
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "hide")
        import pygame
        import pygame.gfxdraw

        if env_id not in CLASSIC_STATE_SIZES:
            raise ValueError(f"{env_id} is not one of {', '.join(CLASSIC_STATE_SIZES)}")
        if textured and env_id == "CartPole-v1":
            raise ValueError("CartPole-v1 has no textured scene")
        self._pygame, self._state_size = pygame, CLASSIC_STATE_SIZES[env_id]
        self.frame_shape = (400, 600, 3) if size is None else (size, size, 3)
        self._top = 0 if size is None else 100  # rows above the native picture
        self._canvas = pygame.Surface((600, 400 + 2 * self._top), depth=32)
        self._picture = self._canvas.subsurface((0, self._top, 600, 400))  # the native part
        self._scaled = None if size is None else pygame.Surface((size, size), depth=32)
        # Red, green, blue in this order: numpy copies that row by row, in 0.03 ms instead of 2.4
        masks = (0xFF, 0xFF00, 0xFF0000, 0)
        self._rgb = pygame.Surface(self.frame_shape[1::-1], depth=24, masks=masks)
        # Gymnasium draws with y upwards and flips the picture at the end; so do plain frames here
        self._flip = not textured
        if textured:
            self._draw = self._draw_textured_car
            scene = canonical_mountain(MOUNTAIN_GOALS[env_id]) if scene is None else scene
            self._background = self._surface(scene if size else scene[100:500])
            self._sprite = self._surface(car_sprite())
        else:
            self._draw = self._draw_cart if env_id == "CartPole-v1" else self._draw_plain_car
            self._background = pygame.Surface(self._canvas.get_size(), depth=32)
            self._background.fill((255, 255, 255))
            native = self._background.subsurface((0, self._top, 600, 400))
            if env_id == "CartPole-v1":
                pygame.gfxdraw.hline(native, 0, 600, 100, (0, 0, 0))
            else:
                x = np.linspace(-1.2, 0.6, 100)
                points = list(zip((x + 1.2) * SCALE, hill(x) * SCALE))
                pygame.draw.aalines(native, (0, 0, 0), False, points)
                goal = MOUNTAIN_GOALS[env_id]
                flag_x, flag_y = int((goal + 1.2) * SCALE), int(hill(goal) * SCALE) + 50
                self._flag = (flag_x, flag_y)

    def render(self, states, out=None):
        """Draw a batch of states.

        Args:
            states: [B, S] float64: CartPole's (x, velocity, angle, angular velocity),
                MountainCar's (x, velocity).
            out: [B, H, W, 3] uint8, written in place; allocated when None.
        Returns:
            out
        Raises:
            ValueError: wrong number of columns in `states`.
        """
        pygame = self._pygame
        states = np.asarray(states, dtype=np.float64)
        if states.ndim != 2 or states.shape[1] != self._state_size:
            raise ValueError(f"states must be [B, {self._state_size}], not {states.shape}")
        if out is None:
            out = np.empty((len(states), *self.frame_shape), np.uint8)
        step = -1 if self._flip else 1
        for state, frame in zip(states, out, strict=True):
            self._canvas.blit(self._background, (0, 0))
            self._draw(state)
            if self._scaled is None:
                self._rgb.blit(self._canvas, (0, 0))
            else:
                pygame.transform.smoothscale(self._canvas, self._scaled.get_size(), self._scaled)
                self._rgb.blit(self._scaled, (0, 0))
            frame[:] = pygame.surfarray.pixels3d(self._rgb).swapaxes(0, 1)[::step]
        return out

    def close(self):
        """Free the surfaces. pygame itself stays: another renderer may be using it."""
        self._canvas = self._picture = self._scaled = self._background = self._sprite = None

    def _polygon(self, points, color):
        self._pygame.gfxdraw.aapolygon(self._picture, points, color)
        self._pygame.gfxdraw.filled_polygon(self._picture, points, color)

    def _circle(self, x, y, radius, color):
        self._pygame.gfxdraw.aacircle(self._picture, int(x), int(y), int(radius), color)
        self._pygame.gfxdraw.filled_circle(self._picture, int(x), int(y), int(radius), color)

    def _box(self, left, right, bottom, top, angle, x, y):
        """Corners of a box turned by `angle` (rad) about the origin and then moved to (x, y)."""
        corners = ((left, bottom), (left, top), (right, top), (right, bottom))
        turned = [self._pygame.math.Vector2(corner).rotate_rad(angle) for corner in corners]
        return [(corner[0] + x, corner[1] + y) for corner in turned]

    def _draw_cart(self, state):
        x, angle = state[0] * 600 / 4.8 + 300, state[2]
        self._polygon(self._box(-25, 25, -15, 15, 0.0, x, 100), (0, 0, 0))
        self._polygon(self._box(-5, 5, -5, 120, -angle, x, 107.5), (202, 152, 101))
        self._circle(x, 107.5, 5, (129, 132, 203))
        # the track runs in front of the cart
        self._pygame.gfxdraw.hline(self._picture, 0, 600, 100, (0, 0, 0))

    def _draw_plain_car(self, state):
        x, y = (state[0] + 1.2) * SCALE, 10 + hill(state[0]) * SCALE
        angle = math.cos(3 * state[0])
        self._polygon(self._box(-20, 20, 0, 20, angle, x, y), (0, 0, 0))
        for wheel in ((10, 0), (-10, 0)):
            turned = self._pygame.math.Vector2(wheel).rotate_rad(angle)
            self._circle(turned[0] + x, turned[1] + y, 8, (128, 128, 128))
        flag_x, top = self._flag  # in front of the car
        self._pygame.gfxdraw.vline(self._picture, flag_x, top - 50, top, (0, 0, 0))
        flag = [(flag_x, top), (flag_x, top - 10), (flag_x + 25, top - 5)]
        self._polygon(flag, (204, 204, 0))

    def _draw_textured_car(self, state):
        slope = math.atan(1.35 * math.cos(3 * state[0]))  # of hill()
        sprite = self._pygame.transform.rotozoom(
            self._sprite, math.degrees(slope), 1 / CAR_SUPERSAMPLING
        )
        # the sprite's centre is CAR_HEIGHT / 2 above the ground, at right angles to the slope
        x = (state[0] + 1.2) * SCALE - math.sin(slope) * CAR_HEIGHT / 2
        y = 400 - hill(state[0]) * SCALE - math.cos(slope) * CAR_HEIGHT / 2
        self._picture.blit(sprite, sprite.get_rect(center=(round(x), round(y))))

    def _surface(self, pixels):
        """[H, W, 3 or 4] uint8 -> pygame surface."""
        height, width, channels = pixels.shape
        kind = "RGB" if channels == 3 else "RGBA"
        surface = self._pygame.image.frombytes(pixels.tobytes(), (width, height), kind)
        if channels == 4:
            return surface
        result = self._pygame.Surface((width, height), depth=32)  # the canvas' format: fast blits
        result.blit(surface, (0, 0))
        return result


SCALE = 600 / (0.6 + 1.2)  # pixels per unit of x in Gymnasium's MountainCar


def hill(x):
    """Height of MountainCar's hill, as Gymnasium has it."""
    return np.sin(3 * x) * 0.45 + 0.55


CAR_SUPERSAMPLING = 4
CAR_WIDTH, CAR_HEIGHT = 64, 30  # pixels of a native frame, with the wheels


def _ellipse(x, y, center_x, center_y, radius_x, radius_y):
    """Signed distance, about, in units of x; negative inside."""
    radius = np.hypot((x - center_x) / radius_x, (y - center_y) / radius_y)
    return (radius - 1) * min(radius_x, radius_y)


def _paint(picture, distance, color):
    """Paint [H, W, 4] with color [3] or [H, W, 3] where the signed distance is negative."""
    inside = np.clip(0.5 - distance * CAR_SUPERSAMPLING, 0, 1)
    picture[..., :3] = _mix(picture[..., :3], color, inside)
    picture[..., 3] = np.maximum(picture[..., 3], inside)


def car_sprite():
    """[H, W, 4] uint8: a red car from its side, facing right, CAR_SUPERSAMPLING times as large."""
    step = 1 / CAR_SUPERSAMPLING
    y, x = np.mgrid[0 : CAR_HEIGHT + 4 : step, 0 : CAR_WIDTH + 4 : step] - 2  # 2 px of margin
    y = CAR_HEIGHT - y  # upwards from the ground
    picture = np.zeros((*x.shape, 4))
    picture[..., :3] = (0.45, 0.05, 0.04)  # what shines through at the edges
    red = np.array((0.80, 0.07, 0.06)) * (0.62 + 0.55 * _smoothstep(y, 6, 21))[..., None]
    body = np.maximum.reduce([np.abs(x - 32) - 31, 5 - y, y - 17 + ((x - 32) / 34) ** 4 * 4])
    roof = np.interp(x[0], [11, 21, 40, 51], [16, 28, 28.5, 16])  # windscreens slope
    cabin = np.maximum(y - roof - 0.8 * np.sin(np.clip((x - 16) / 30, 0, 1) * np.pi), 14 - y)
    _paint(picture, np.maximum(cabin * 0.7, np.abs(x - 31) - 20), red)
    _paint(picture, body, red)
    glass = np.array((0.20, 0.27, 0.33)) + 0.4 * _smoothstep(y - 0.4 * x, 4, 14)[..., None]
    window = np.maximum(np.maximum(cabin * 0.7 + 2.6, 17.5 - y), 1.1 - np.abs(x - 31.5))
    _paint(picture, window, glass)
    _paint(picture, np.maximum(np.abs(y - 12.2) - 0.35, np.abs(x - 32) - 28), (0.45, 0.03, 0.03))
    _paint(picture, _ellipse(x, y, 61, 13.5, 2.2, 2.0), (1.0, 0.97, 0.80))
    _paint(picture, _ellipse(x, y, 2.4, 13.5, 1.6, 2.2), (0.98, 0.45, 0.10))
    for center in (14, 50):
        _paint(picture, _ellipse(x, y, center, 7, 8.6, 8.6), (0.16, 0.02, 0.02))  # wheel arch
        _paint(picture, _ellipse(x, y, center, 7, 7.2, 7.2), (0.06, 0.06, 0.065))
        _paint(picture, _ellipse(x, y, center, 7, 4.2, 4.2), (0.70, 0.71, 0.73))
        _paint(picture, _ellipse(x, y, center, 7, 1.4, 1.4), (0.25, 0.25, 0.26))
    return _bytes(picture)


def mountain_scene(rng=None, goal=0.5):
    """[600, 600, 3] uint8: MountainCar's hill as a landscape, rows 100 to 500 of which are
    Gymnasium's native picture. Rendered at twice the size from a height field, front to back.

    Args:
        rng: np.random.Generator that varies the scene (to train on); None: the canonical one.
        goal: x of the flag.
    """
    vary = rng is not None
    rng = rng or np.random.default_rng(11)

    def around(value, spread):
        value = np.asarray(value, float)
        return value * (1 + rng.uniform(-spread, spread, value.shape)) if vary else value

    size, depth = 1200, 500  # pixels across, samples from the crest (0) to the viewer
    scale = 2 * SCALE
    row, column = np.mgrid[:size, :size].astype(float)
    height = (1000 - row) / scale  # in units of hill(); the native picture's bottom line is 0
    x = -1.2 + column / scale
    haze, zenith = around((0.80, 0.86, 0.91), 0.05), around((0.20, 0.40, 0.70), 0.15)

    # Sky: clouds lie on a plane overhead, so that they get denser towards the horizon
    noise = fractal_noise(rng, 1024, 1.5, 3)
    up = np.clip((height - 0.25) / 1.3, 0, None)
    color = _mix(haze, zenith, np.minimum(up, 1) ** 0.7)
    distance = 130 / (up + 0.22)
    u, v = (column - 600) / 600 * distance + 300, 2.2 * distance
    cover = around(0.52, 0.4)
    density = _smoothstep(_sample(noise, v, u), 1 - cover - 0.05, 1 - cover + 0.33)
    lit = _smoothstep(_sample(noise, v, u) - _sample(noise, v + 14, u + 10), -0.12, 0.12)
    cloud = (0.78 + 0.22 * lit)[..., None] * np.array((1.0, 1.0, 1.01))
    color = _mix(color, cloud, density * _smoothstep(up, 0.0, 0.22) * 0.92)

    # Distant ranges, the farther the bluer
    for base, relief, air in ((0.52, 0.34, 0.70), (0.36, 0.30, 0.48)):
        line = fractal_noise(rng, 512, 2.1, 2)[0]
        line = line + 0.05 * fractal_noise(rng, 512, 1.5, 12)[0]
        crest = base + relief * np.interp(np.arange(size) * 0.4, np.arange(512), line)
        below = crest - height
        rough = np.tile(fractal_noise(rng, 600, 1.75, 5), (2, 2))
        light = np.clip(0.60 + 1.5 * (rough - np.roll(rough, (5, 9), (0, 1))), 0.1, 1.3)
        rock = np.array((0.42, 0.44, 0.47)) * light[..., None]
        snow = _smoothstep(height + 0.16 * (rough - 0.5), 0.62, 0.68)
        rock = _mix(rock, np.array((0.93, 0.95, 0.98)) * (0.5 + 0.5 * light)[..., None], snow)
        rock = _mix(rock, haze * (0.93, 0.96, 1.0), air)
        color = _mix(color, rock, _smoothstep(below, 0, 0.004))

    # The mountain: a height field z [depth, size] that falls from the crest hill(x) to a meadow.
    # Ridged noise makes spurs and gullies; it vanishes at the crest, which the car drives on.
    near = np.linspace(0, 1, depth)[:, None]
    crest = hill(x[0])[None]
    warp = fractal_noise(rng, size, 1.9, 3)[:depth] * 150
    ridged = np.zeros((depth, size))
    line, place = np.mgrid[:depth, :size].astype(float)
    for stretch, weight in ((0.55, 1.0), (1.3, 0.42), (2.7, 0.16)):
        layer = fractal_noise(rng, 512, 2.35, 3)
        value = _sample(
            layer, (line * 0.8 + 0.35 * place + warp) * stretch, (0.42 * place + warp) * stretch
        )
        ridged += weight * (1 - np.abs(2 * value - 1))
    ridged = ridged / 1.58 - 0.5
    meadow = 0.02 + 0.05 * (warp / 150 - 0.5)
    fall = 1 - _smoothstep(near, -0.25, 0.95)
    fall = fall / fall[0]
    steep = np.clip(crest * 1.1, 0.1, 1)
    z = meadow * (1 - fall) + crest * fall
    rough = _smoothstep(near, 0, 0.25) * (0.12 + 0.88 * _smoothstep(fall, 0, 0.5))
    z = z + 0.34 * ridged * steep * rough
    tilt = 0.36
    seen = np.minimum(z - tilt * near, crest - 0.002 * near)  # nothing rises above the crest
    z = seen + tilt * near

    # Light: Lambert with the sun from the upper left, plus sky; hollows are darker
    slope_x = np.gradient(z, 1 / scale, axis=1)
    slope_y = np.gradient(z, 1.3 / depth, axis=0)
    normal = np.stack([-slope_x, -slope_y, np.ones_like(z)])
    normal /= np.linalg.norm(normal, axis=0)
    azimuth = rng.uniform(-0.5, 0.5) if vary else 0.0
    sun = np.array((-0.72 * np.cos(azimuth), 0.35 - 0.3 * np.sin(azimuth), 0.60))
    sun /= np.linalg.norm(sun)
    light = np.clip(np.tensordot(sun, normal, 1), 0, 1)
    # shadows: march towards the sun along each line of equal depth
    shadow = np.full_like(z, -np.inf)
    for step in range(4, 160, 6):
        blocker = np.roll(z, step, 1) - step / scale * 0.75
        blocker[:, :step] = -np.inf
        shadow = np.maximum(shadow, blocker)
    light *= 1 - 0.75 * _smoothstep(shadow - z, 0.0, 0.02)

    down = 350 * near - 550 * z  # about the way along the surface, so that cliffs are not streaked
    grain = _sample(fractal_noise(rng, 1024, 0.75, 20), down, place)
    patch = _sample(fractal_noise(rng, 1024, 1.35, 6), down, place)
    strata = 0.5 + 0.5 * np.sin(70 * (z + 0.10 * x[:1] + 0.05 * patch))
    tone = 0.57 + 0.34 * patch + 0.30 * grain + 0.10 * strata
    ground = np.array((0.47, 0.43, 0.39)) * tone[..., None]
    flat = normal[2]
    grass = np.array((0.30, 0.40, 0.13)) * (0.62 + 0.5 * patch + 0.55 * (grain - 0.5))[..., None]
    grass = _mix(grass, (0.52, 0.49, 0.22), _smoothstep(patch, 0.6, 0.95) * 0.5)
    green = _smoothstep(0.40 - z + 0.30 * (patch - 0.5) + 0.22 * (flat - 0.6), -0.03, 0.07)
    ground = _mix(ground, grass, green)
    scree = _smoothstep(patch - 0.2 * flat, 0.42, 0.6) * (1 - green) * 0.35
    ground = _mix(ground, (0.56, 0.53, 0.50), scree)
    snow = _smoothstep(z + 0.22 * (patch - 0.5) + 0.20 * (flat - 0.55), 0.70, 0.76)
    snow *= _smoothstep(flat, 0.20, 0.36)
    ground = _mix(ground, (0.95, 0.97, 1.0), snow)
    shade = light[..., None] * np.array((1.05, 0.99, 0.90)) + np.array((0.30, 0.34, 0.42))
    ground = ground * shade

    # Project: column by column, the nearest sample that reaches up to a pixel is what one sees
    visible = np.maximum.accumulate(seen[::-1], 0)  # from the viewer to the crest
    for i in range(size):
        index = np.searchsorted(visible[:, i], height[:, i])
        hit = index < depth
        color[hit, i] = ground[depth - 1 - index[hit], i]
    corner = (slice(100, 400), slice(1080, None))  # from x = 0.42 on
    _paint_flag(color[corner], x[corner], height[corner], goal)
    return _bytes(color.reshape(600, 2, 600, 2, 3).mean((1, 3)))


@functools.cache  # two seconds of work
def canonical_mountain(goal):
    """`mountain_scene` without variation: [600, 600, 3] uint8."""
    return mountain_scene(goal=goal)


def _paint_flag(color, x, height, goal):
    """A yellow flag on a pole at x = goal, in place."""
    u, v = (x - goal) * SCALE, (height - hill(goal)) * SCALE  # pixels of a native frame
    pole = np.maximum(np.abs(u) - 1.5, np.abs(v - 28) - 31)
    wave = 2.0 * np.sin(u / 6.0)
    cloth = np.maximum(np.abs(u - 16.5) - 15.5, np.abs(v - 45 + wave) - 11)
    folds = 0.90 + 0.14 * np.cos(u / 6.0 + 0.6)
    inside = np.clip(0.5 - 2 * cloth, 0, 1)
    color[:] = _mix(color, np.array((1.0, 0.83, 0.05)) * folds[..., None], inside)
    inside = np.clip(0.5 - 2 * pole, 0, 1)
    color[:] = _mix(color, (0.85, 0.85, 0.83), inside)


# ------------------------------------------------------------------------------ videos


def write_video(path, frames, fps):
    """Write frames [T, H, W, 3] uint8 as H.264 mp4 (through a temporary file, so that a reader
    never meets half of one). Odd heights and widths lose a line: the codec wants even ones."""
    import imageio.v2 as imageio

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    even = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]
    partial = path.with_name("." + path.name)
    imageio.mimwrite(partial, list(even), format="FFMPEG", fps=fps, macro_block_size=2, quality=8)
    partial.replace(path)


def add_video(writer, tag, frames, step, fps):
    """Put frames [T, H, W, 3] uint8 into a TensorBoard event file as an animated picture.

    SummaryWriter.add_video drops the video without a word when it does not like the installed
    moviepy; TensorBoard itself only wants a GIF in an image summary, which Pillow can make.
    """
    from PIL import Image
    from tensorboard.compat.proto.summary_pb2 import Summary

    pictures = [Image.fromarray(frame) for frame in frames]
    gif = io.BytesIO()
    pictures[0].save(
        gif, "GIF", save_all=True, append_images=pictures[1:], duration=1000 / fps, loop=0
    )
    image = Summary.Image(
        height=frames.shape[1],
        width=frames.shape[2],
        colorspace=3,
        encoded_image_string=gif.getvalue(),
    )
    writer._get_file_writer().add_summary(
        Summary(value=[Summary.Value(tag=tag, image=image)]), global_step=step
    )
