"""Pictures: which GL draws them, physics states -> frames, the realistic scene, videos.

    import egl_render
    egl_render.setup_gl("cuda:0")                       # before mujoco is imported
    model = egl_render.textured_model(xml_path)         # sky, stone floor, pale metal body
    renderer = egl_render.MujocoRenderer(model, size=480, camera=egl_render.PAPER_CAMERA)
    renderer.render(states, out)                        # [B, nq+nv] float64 -> [B, H, W, 3] uint8

mujoco reads MUJOCO_GL when it is imported, so this module imports it inside functions only.
"""

import contextlib
import ctypes
import ctypes.util
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

    Returns:
        One line on what will draw, e.g. "EGL in software (Mesa)".
    Raises:
        GLError: no GL library, or PyOpenGL was imported before for another backend.
    """
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


class MujocoRenderer:
    """Draws MuJoCo states without stepping; what it draws is what `env.render()` draws.

    Args:
        model: compiled mujoco.MjModel. Its visual quality is changed in place by `quality`.
        size: height and width of the frames in pixels.
        camera: a `Camera`; see `env_camera` and `PAPER_CAMERA`.
        quality: "full" leaves the model's own settings (MuJoCo's default: 4096 px shadow map, 4
            samples a pixel). "light" is for software GL, where the time goes into shadow maps,
            reflections, multisampling and vertices: none of the first three, half the facets. On
            two cores at 96 px that is 450 frames/s against 20.
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
        if quality == "light":
            model.vis.quality.shadowsize = 0
            model.vis.quality.offsamples = 0
            model.vis.quality.numslices = 14
            model.vis.quality.numstacks = 8
            model.mat_reflectance[:] = 0
        self._renderer = mujoco.Renderer(model, size, size, max_geom=1000)
        if quality == "light":
            self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
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
            self._renderer.update_scene(data, self._view)
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
    # directions in the world frame (z up) of each face's pixels, row 0 at the face's top
    faces = {
        "right": (one, -u, -v),
        "left": (-one, u, -v),
        "up": (-v, -u, one),
        "down": (v, -u, -one),
        "front": (-u, -one, -v),
        "back": (u, one, -v),
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
