"""What a state looks like: GL, cameras, MuJoCo's pictures, the realistic scene, videos.

    import egl_render
    egl_render.setup_gl("cuda:0")                       # before mujoco is imported
    model = egl_render.textured_model(xml_path)         # sky, stone floor, pale metal body
    renderer = egl_render.MujocoRenderer(model, size=480, camera=egl_render.PAPER_CAMERA)
    renderer.render(states)                             # [B, S] float64 -> [B, H, W, 3] uint8

A MuJoCo state is all that a picture depends on: qpos, qvel and poses of mocap bodies (`state_of`).

mujoco reads MUJOCO_GL when it is imported, so this module imports it inside functions only.
"""

import contextlib
import ctypes.util
import functools
import importlib.util
import os
import sys
import warnings
from dataclasses import dataclass as plain_dataclass
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from annotated_types import Interval
from pydantic.dataclasses import dataclass

from clip_reward import UsageError, message_of, one_line

if TYPE_CHECKING:
    import mujoco
    from torch.utils.tensorboard import SummaryWriter

SCENES = Path(__file__).resolve().parent / "scenes"
INSTALL_GL = "apt-get update && apt-get install -y libegl1 libgl1-mesa-dri libgles2"
INSTALL_WARP = 'pip install ".[warp]"'


def setup_gl(device: object = "cpu") -> None:
    """Set environment variables that make MuJoCo draw on a torch device, "cpu" or "cuda:i". Call it
    before mujoco is imported. A MUJOCO_GL that is set stays. mujoco.egl numbers devices as CUDA."""
    # Mesa and triton (which torchvision imports) each bring an LLVM. Loading triton's second causes
    # a segmentation fault; loading it first does not.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton._C.libtriton")
    name, _, number = str(device).partition(":")
    if name == "cuda":  # the value that a worker inherits may name another GPU
        os.environ["MUJOCO_EGL_DEVICE_ID"] = number or "0"
    if sys.platform == "linux" and "MUJOCO_GL" not in os.environ:
        # importing mujoco fails if MUJOCO_GL names a library that is missing
        found = [name for name in ("EGL", "OSMesa") if ctypes.util.find_library(name)]
        os.environ["MUJOCO_GL"] = [*found, "disable"][0].lower()


@functools.cache
def gl_renderer() -> str:
    """Return OpenGL's name of this process's renderer: "llvmpipe (LLVM 15.0.6, 256 bits)".

    Raises UsageError where there is no OpenGL, or none on the GPU this process is bound to."""
    try:
        import mujoco
        from OpenGL.GL import GL_RENDERER, glGetString

        context = mujoco.GLContext(16, 16)
        context.make_current()
        name = glGetString(GL_RENDERER).decode()
        context.free()
    except Exception as error:  # its type depends on library and platform
        ways = f"type: {INSTALL_GL}; or draw without OpenGL: {INSTALL_WARP}"
        raise UsageError(f"there is no OpenGL to draw with ({one_line(error)}); {ways}") from error
    return name


def draws_by_warp(args: "RenderArgs", model: "mujoco.MjModel") -> bool:
    """Return whether MuJoCo Warp draws the model: if the flags ask for it, or if it is installed
    and no GPU has OpenGL. If Warp would leave something out, OpenGL draws on the CPU if it can."""
    if args.renderer == "auto" and importlib.util.find_spec("mujoco_warp"):
        try:
            return is_software(gl_renderer()) and not left_out_by_warp(model)
        except UsageError:
            return True
    return args.renderer == "warp"


def left_out_by_warp(model: "mujoco.MjModel") -> str:
    """Name the visible parts of a model that MuJoCo Warp does not draw, "" if there are none."""
    import mujoco

    of_materials = np.append(model.mat_rgba[:, 3], 1.0)  # index -1: no material
    alpha = model.geom_rgba[:, 3] * of_materials[model.geom_matid]
    parts = {
        "sites": (model.site_rgba[:, 3] > 0) & (model.site_group < 3),
        "tendons": model.wrap_type == mujoco.mjtWrap.mjWRAP_SITE,
        "skins": model.skin_rgba[:, 3] > 0,
        "transparency": (0 < alpha) & (alpha < 1) & (model.geom_group < 3),
        "the lenses of its cameras": (model.cam_projection > 0) | model.cam_sensorsize.any(1),
    }
    return ", ".join(name for name, shown in parts.items() if shown.any())


def is_software(name: str) -> bool:
    """Return whether a name from `gl_renderer()` means a renderer that runs on the CPU."""
    return any(part in name.lower() for part in ("llvmpipe", "softpipe", "swrast", "software"))


def quiet_mujoco() -> None:
    """Drop MuJoCo's deprecation warnings about model files: users cannot fix Gymnasium's files.
    Other warnings go to stderr. Call it before the first environment is made."""
    # Gymnasium imports glfw, which starts a Python process to look for its library unless it knows
    # the path. A signal during the start would make that process print a traceback.
    found = importlib.util.find_spec("glfw")
    library = Path(found.origin).with_name("x11") / "libglfw.so" if found and found.origin else None
    if library and library.exists():
        os.environ.setdefault("PYGLFW_LIBRARY", str(library))
    try:
        import mujoco
    except Exception as error:  # its type depends on the library
        where = f"MUJOCO_GL is {os.environ.get('MUJOCO_GL', 'not set')}"
        problem = f"mujoco cannot be imported ({message_of(error)}); {where}"
        if not where.endswith(("egl", "osmesa")):
            raise UsageError(problem) from error
        print(f"no OpenGL: {problem}", file=sys.stderr)
        os.environ["MUJOCO_GL"] = "disable"  # Warp needs no OpenGL
        import mujoco

    mujoco.set_mju_user_warning(
        lambda text: None if "deprecated" in text else print(f"MuJoCo: {text}", file=sys.stderr)
    )
    warnings.filterwarnings("ignore", ".* is deprecated", UserWarning)  # from MjSpec.compile


UNSTABLE = (
    "MuJoCo reset an unstable simulation, or the task reset itself within step(), so the agent "
    "would be rewarded for a pose that it did not reach; smaller actions or a smaller timestep of "
    "the model may help against an unstable simulation"
)

Metres = Annotated[float, Interval(gt=-1e6, lt=1e6)]


@dataclass(config={"extra": "forbid"})
class RenderArgs:
    """Flags of the pictures that CLIP sees."""

    render_size: Annotated[int | None, Interval(ge=16, le=8192)] = None
    """height and width of the frames in pixels (default: 480, for tiny_clip 64)"""
    renderer: Literal["auto", "egl", "warp"] = "auto"
    """what draws MuJoCo's states: OpenGL through EGL, or MuJoCo Warp, which needs no OpenGL and
    draws on the device that CLIP uses; auto: EGL if a GPU supports it, otherwise Warp"""
    textured: bool = True
    """draw Gymnasium's own models with a realistic sky, stone floor and sunlight, its humanoid with
    a metal surface, and MountainCar as a landscape; other models keep their own look"""
    camera_distance: Annotated[float | None, Interval(gt=0, lt=1e6)] = None
    """metres from the camera to the point it looks at. Without the four --camera flags, the
    humanoid has the paper's camera at three azimuths, and any other task has its own camera"""
    camera_azimuth: tuple[Annotated[float, Interval(ge=-360, le=360)], ...] = ()
    """the camera's direction, in degrees around the vertical axis. With several directions, CLIP
    scores one picture from each, and a state's reward is the mean score (default: 180 120 240 for
    the humanoid, because a single camera may not see its knees and hands; the paper: 180)"""
    camera_elevation: Annotated[float | None, Interval(ge=-360, le=360)] = None
    """the camera's tilt in degrees; with a negative tilt it looks down"""
    camera_lookat: tuple[Metres, Metres, Metres] | None = None
    """the point that the camera looks at, in metres; x and y follow a robot that can leave the
    picture"""

    @property
    def views(self) -> int:
        """The number of pictures of each state."""
        return max(1, len(self.camera_azimuth))


@plain_dataclass(frozen=True)
class Camera:
    """The place and direction of a camera, in degrees and metres, as in MuJoCo's mjvCamera. If
    `track_body` >= 0, lookat's x and y follow that body; lookat's z stays."""

    distance: float
    azimuth: float
    elevation: float
    lookat: tuple[float, float, float] = (0.0, 0.0, 0.0)
    track_body: int = -1
    fixed_id: int = -1  # >= 0: one of the model's own cameras; the other fields are ignored

    @property
    def axes(self) -> np.ndarray:
        """Right, up and backward axes in the world, as columns [3, 3], as in mjv_updateCamera."""
        azimuth, elevation = np.radians([self.azimuth, self.elevation])
        level = np.array([np.cos(azimuth), np.sin(azimuth), 0])
        forward = np.cos(elevation) * level + [0, 0, np.sin(elevation)]
        right = np.array([level[1], -level[0], 0])
        return np.stack([right, np.cross(right, forward), -forward], 1)


# The humanoid's camera in the paper (section 4.3 and its appendix): tracks the torso, body 1.
PAPER_CAMERA = Camera(3.5, 180.0, -10.0, (0.0, 0.0, 1.0), track_body=1)
CAMERA_VALUES = ("distance", "azimuth", "elevation", "lookat")


def env_camera(env: Any) -> Camera:
    """Return the `Camera` of a Gymnasium MuJoCo environment's own `render()`. If a task names no
    lookat, Gymnasium uses the median place of its geoms in the first picture. This function uses
    their median place in qpos0, which is the same for every environment."""
    import mujoco

    env = env.unwrapped
    data, free = mujoco.MjData(env.model), mujoco.MjvCamera()  # with MuJoCo's default angles
    mujoco.mj_kinematics(env.model, data)
    config = env.mujoco_renderer.default_cam_config or {}
    return Camera(
        distance=config.get("distance", env.model.stat.extent),
        azimuth=config.get("azimuth", free.azimuth),
        elevation=config.get("elevation", free.elevation),
        lookat=tuple(config.get("lookat", np.median(data.geom_xpos, axis=0))),
        fixed_id=env.mujoco_renderer.camera_id,
    )


def is_gymnasiums(spec: Any) -> bool:
    """Return whether the class of a task, given as a gymnasium.EnvSpec, comes with Gymnasium."""
    return str(spec.entry_point).startswith("gymnasium.envs.mujoco")


def choose_camera(
    args: RenderArgs, env: Any, default: Camera | None = None
) -> Camera | list[Camera]:
    """Return the `Camera` that the flags ask for in a Gymnasium MuJoCo environment, or a list for
    several azimuths. Settings that no flag gives come from `default`, or else from the paper's
    camera (humanoid) or the environment's (other tasks). Unless the task sets a lookat, the
    camera tracks the first body that is free or slides without limits and has actuators: a robot
    that can leave the picture, but not a cart on a rail, a ball or a pushed puck."""
    import mujoco

    model, joint = env.unwrapped.model, mujoco.mjtJoint
    config = env.unwrapped.mujoco_renderer.default_cam_config or {}
    humanoid = env.spec and env.spec.id.startswith("Humanoid") and is_gymnasiums(env.spec)
    camera = default or (PAPER_CAMERA if humanoid else env_camera(env))
    values = {name: getattr(args, f"camera_{name}") for name in CAMERA_VALUES}
    given = {name: value for name, value in values.items() if value not in (None, ())}
    if camera.fixed_id >= 0 and not given:
        return camera  # one of the model's own cameras, which tracks in its own way
    slides = (model.jnt_type == joint.mjJNT_SLIDE) & (model.jnt_limited == 0)
    endless = slides | (model.jnt_type == joint.mjJNT_FREE)
    roots = model.body_rootid[model.jnt_bodyid]
    of_joints = model.actuator_trntype == mujoco.mjtTrn.mjTRN_JOINT
    driven = {*roots[model.actuator_trnid[of_joints, 0]]} or {*roots[:1]}
    robots = [int(body) for body in model.jnt_bodyid[endless] if body in driven]
    looks_there = "lookat" in config and "trackbodyid" not in config
    if default is None and robots and not looks_there:
        camera = replace(camera, track_body=robots[0])
    azimuths = given.pop("azimuth", [camera.azimuth])
    camera = replace(camera, **given, fixed_id=-1)
    cameras = [replace(camera, azimuth=azimuth) for azimuth in azimuths]
    return cameras if len(cameras) > 1 else cameras[0]


# ------------------------------------------------------------------------------ MuJoCo

# prefixes of the names of the model's arrays that a picture shows
SHOWN = tuple(
    "qpos0 body_pos body_quat jnt_pos jnt_axis geom_type geom_dataid geom_matid geom_group "
    "geom_size geom_pos geom_quat geom_rgba site_ cam_ light_ mesh_ hfield_ skin_ flex_ tex_ mat_ "
    "tendon_matid tendon_group tendon_width tendon_rgba wrap_".split()
)


def look_of(model: "mujoco.MjModel") -> dict[str, Any]:
    """Return the parts of a model that a picture shows, by name: arrays, and numbers in `vis`."""
    look = {name: getattr(model, name) for name in dir(model) if name.startswith(SHOWN)}
    for part in "global_", "headlight", "map", "quality", "scale", "rgba":
        group = getattr(model.vis, part)
        # not the size of the buffer, which Gymnasium changes
        names = [name for name in dir(group) if not name.startswith(("_", "off"))]
        look |= {f"vis.{part}.{name}": getattr(group, name) for name in names}
    return look


def looks_that_differ(model: "mujoco.MjModel", other: "mujoco.MjModel") -> str:
    """Name the parts in which two models look different, or return "" if there are none."""
    one, two = look_of(model), look_of(other)
    return ", ".join(name for name in one if not np.array_equal(one[name], two[name]))


def views_of(size: int, camera: Camera | list[Camera]) -> tuple[list[Camera], tuple[int, ...]]:
    """Return a renderer's cameras and the shape of its frames."""
    if isinstance(camera, list):
        return camera, (len(camera), size, size, 3)
    return [camera], (size, size, 3)


def state_of(data: "mujoco.MjData") -> np.ndarray:
    """Return a state: qpos, qvel, positions and quaternions of the mocap bodies, [nq + nv + 7 *
    nmocap] float64."""
    mocap = data.mocap_pos.ravel(), data.mocap_quat.ravel()
    return np.concatenate([data.qpos, data.qvel, *mocap])


def parts_of(states: np.ndarray, model: "mujoco.MjModel") -> list[np.ndarray]:
    """Split states [B, S] of the model into qpos [B, nq], qvel [B, nv], and positions [B, nmocap,
    3] and quaternions [B, nmocap, 4] of its mocap bodies, float64. Raises ValueError."""
    states = np.asarray(states, np.float64)
    size = model.nq + model.nv + 7 * model.nmocap
    if states.ndim != 2 or states.shape[1] != size:
        raise ValueError(f"states must be [B, {size}], not {states.shape}")
    ends = np.cumsum([model.nq, model.nv, 3 * model.nmocap])
    *joints, positions, quaternions = np.split(states, ends, axis=1)
    mocap = len(states), model.nmocap
    return [*joints, positions.reshape(*mocap, 3), quaternions.reshape(*mocap, 4)]


def place(model: "mujoco.MjModel", data: "mujoco.MjData", parts: Any) -> None:
    """Put one state, its four `parts_of`, into `data`, and compute what a picture of it needs."""
    import mujoco

    data.qpos, data.qvel, data.mocap_pos, data.mocap_quat = parts
    # the part of mj_forward that a picture needs: positions, cameras, lights, tendons
    mujoco.mj_kinematics(model, data)
    mujoco.mj_comPos(model, data)
    mujoco.mj_camlight(model, data)
    mujoco.mj_flex(model, data)
    mujoco.mj_tendon(model, data)


FLOOR = 10.0  # m: a plane with a smaller half-size is a wall, a table or a goal


class MujocoRenderer:
    """Draw MuJoCo states without stepping, as `env.render()` draws them.

    Args:
        model: compiled mujoco.MjModel.
        size: height and width of the frames in pixels.
        camera: a `Camera`, or a list of V cameras, which all draw each state: a frame is then [V,
            H, W, 3], not [H, W, 3]. See `choose_camera`, `env_camera` and `PAPER_CAMERA`.
    Raises UsageError as `gl_renderer` does.
    """

    look = "egl"

    def __init__(
        self,
        model: "mujoco.MjModel",
        size: int = 480,
        camera: Camera | list[Camera] = PAPER_CAMERA,
    ) -> None:
        import mujoco

        self.cameras, self.frame_shape = views_of(size, camera)
        self.description = gl_renderer()
        self.model, self.data = model, mujoco.MjData(model)
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, size)
        model.vis.global_.offheight = max(model.vis.global_.offheight, size)
        # sites, parts of tendons and lights are geoms of the scene, too
        self._renderer = mujoco.Renderer(model, size, size, max_geom=10_000 + 2 * model.ngeom)

    def _view(self, camera):
        """Return the mujoco.MjvCamera of a `Camera` for the state in `data`."""
        import mujoco

        view = mujoco.MjvCamera()
        if camera.fixed_id >= 0:
            view.type = mujoco.mjtCamera.mjCAMERA_FIXED
            view.fixedcamid = camera.fixed_id
        for name in CAMERA_VALUES:
            setattr(view, name, getattr(camera, name))
        if camera.track_body >= 0:
            view.lookat[:2] = self.data.xpos[camera.track_body, :2]
        return view

    def render(self, states: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Draw `states` [B, S] float64 into `out` [B, *frame_shape] uint8, C-contiguous, new if it
        is None -> out. Raises ValueError for a wrong number of columns."""
        parts = parts_of(states, self.model)
        out = np.empty((len(states), *self.frame_shape), np.uint8) if out is None else out
        for *state, frame in zip(*parts, out, strict=True):
            place(self.model, self.data, state)
            pictures = frame.reshape(-1, *self.frame_shape[-3:])
            for camera, picture in zip(self.cameras, pictures, strict=True):
                self._draw(self._view(camera), picture)
        return out

    def _draw(self, view, picture):
        import mujoco

        # MuJoCo centres infinite planes below the scene's camera. This must be the camera of this
        # picture, or pixels would depend on which picture was drawn before.
        mujoco.mjv_updateCamera(self.model, self.data, view, self._renderer.scene)
        self._renderer.update_scene(self.data, view)
        self._renderer.render(out=picture)

    def close(self) -> None:
        """Free the GL context."""
        self._renderer.close()


# ------------------------------------------------------------------------------ realistic scene


@plain_dataclass(frozen=True)
class Scene:
    """A textured scene: the canonical one, unless scenes/paint.py varies it. Colours are RGB from 0
    to 1, angles are in degrees, and pictures are [H, W, 3] uint8."""

    sky: np.ndarray = field(default_factory=lambda: load_picture("sky"))  # six faces, from the top
    stone: np.ndarray = field(default_factory=lambda: load_picture("stone"))  # the floor, a tile
    metal: np.ndarray = field(default_factory=lambda: load_picture("metal"))  # the robot, a tile
    tile: float = 4.0  # metres that one repeat of the flagstones covers
    haze: tuple[float, float, float] = (0.80, 0.86, 0.91)
    dark: tuple[float, float, float] = (0.16, 0.17, 0.19)  # the humanoid's joints
    sun_azimuth: float = -38.0  # over the paper camera's shoulder
    sun_height: float = 48.0
    sun: float = 0.62  # brightness of the three lights
    ambient: float = 0.42
    headlight: float = 0.16


def load_picture(name: str) -> np.ndarray:
    """Load scenes/`name`.png as [H, W, 3 or 4] uint8."""
    from PIL import Image

    with Image.open(SCENES / f"{name}.png") as picture:
        return np.asarray(picture)


def drawn_model(env: Any, textured: bool = True, sites_as_geoms: bool = False) -> "mujoco.MjModel":
    """Return the model from which states of a Gymnasium MuJoCo environment are drawn.

    With `textured` it looks like `textured_model`'s; otherwise, or if the environment has changed
    its model in Python, it looks like the environment's own. With `sites_as_geoms`, visible sites
    become geoms, because MuJoCo Warp draws no sites."""
    import mujoco

    task = env.unwrapped
    try:
        spec = mujoco.MjSpec.from_file(task.fullpath)
    except (AttributeError, ValueError):  # the model has been made in Python
        return task.model
    model = spec.compile()
    if looks_that_differ(task.model, model):
        return task.model
    if textured:
        restyle(spec, task.fullpath)
    for i in range(model.nsite if sites_as_geoms else 0):
        material = model.mat(model.site_matid[i]).name if model.site_matid[i] >= 0 else ""
        geom = spec.bodies[model.site_bodyid[i]].add_geom(
            type=mujoco.mjtGeom(model.site_type[i]),
            size=model.site_size[i],
            pos=model.site_pos[i],
            quat=model.site_quat[i],
            rgba=model.site_rgba[i],
            material=material,
            group=model.site_group[i],
            contype=0,
            conaffinity=0,
            mass=0,
        )
        geom.alt.type = mujoco.mjtOrientation.mjORIENTATION_QUAT  # whatever the file's default is
        geom.fromto = np.full(6, np.nan)
        spec.sites[i].rgba = [0, 0, 0, 0]
    return spec.compile()


def textured_model(xml_path: str | Path, scene: Scene | None = None) -> "mujoco.MjModel":
    """Compile the MuJoCo model at `xml_path`. A model that comes with Gymnasium gets the sky, floor
    and light of a `Scene`, and its humanoid becomes a metal robot. Any other model keeps its own
    look. The physics stay the same bit for bit."""
    import mujoco

    quiet_mujoco()
    spec = mujoco.MjSpec.from_file(str(xml_path))
    restyle(spec, xml_path, scene)
    return spec.compile()


def restyle(spec: "mujoco.MjSpec", xml_path: str | Path, scene: Scene | None = None) -> None:
    """Give a model that comes with Gymnasium the look of a `Scene`, as in `textured_model`."""
    import gymnasium
    import mujoco

    assets = Path(gymnasium.__file__).parent / "envs/mujoco/assets"
    if Path(xml_path).resolve().parent != assets.resolve():
        return
    scene = scene or Scene()
    kinds = mujoco.mjtTexture
    skies = [texture for texture in spec.textures if texture.type == kinds.mjTEXTURE_SKYBOX]
    for replaced in (*skies, *spec.lights):
        spec.delete(replaced)
    for name, kind, picture, repeat, specular, shininess in (
        ("clip_sky", kinds.mjTEXTURE_SKYBOX, scene.sky, 1, 0, 0),
        ("clip_stone", kinds.mjTEXTURE_2D, scene.stone, 1 / scene.tile, 0.15, 0.2),
        ("clip_metal", kinds.mjTEXTURE_CUBE, np.concatenate([scene.metal] * 6), 3, 0.75, 0.55),
    ):
        height, width = picture.shape[:2]
        texture = spec.add_texture(name=name, type=kind, height=height, width=width, nchannel=3)
        texture.data = picture.tobytes()
        material = spec.add_material(name=name, specular=specular, shininess=shininess)
        material.textures[mujoco.mjtTextureRole.mjTEXROLE_RGB] = name
        material.texrepeat, material.texuniform = [repeat, repeat], True  # in metres
    spec.add_material(name="clip_dark", specular=0.6, shininess=0.6)

    for geom in spec.worldbody.geoms:
        plane = geom.type == mujoco.mjtGeom.mjGEOM_PLANE
        if plane and min(geom.size[:2]) >= FLOOR:
            geom.material, geom.rgba = "clip_stone", [1, 1, 1, 1]
            geom.size = [0, 0, geom.size[2]]  # drawn to the horizon; contacts ignore the size
    if spec.modelname.startswith("humanoid"):
        _make_metal(spec, np.append(scene.dark, 1.0))
    azimuth, height = np.radians([scene.sun_azimuth, scene.sun_height])
    across = np.cos(height)
    sun = -np.array([np.cos(azimuth) * across, np.sin(azimuth) * across, np.sin(height)])
    robot = spec.worldbody.first_body() or spec.worldbody
    robot.add_light(  # moves with the robot, which thus stays inside the shadow map
        name="clip_sun",
        mode=mujoco.mjtCamLight.mjCAMLIGHT_TRACKCOM,
        type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL,
        pos=-8 * sun - np.asarray(robot.pos),
        dir=sun,
        diffuse=scene.sun * np.array([1.0, 0.96, 0.88]),
        specular=[0.4, 0.4, 0.38],
    )
    visual = spec.visual
    visual.headlight.ambient = scene.ambient * np.array([0.95, 0.98, 1.05])
    visual.headlight.diffuse = scene.headlight * np.ones(3)
    visual.headlight.specular = [0.1, 0.1, 0.1]
    visual.rgba.haze = [*(np.asarray(scene.haze) * 0.93), 1.0]
    visual.map.haze = 0.35
    visual.map.shadowclip = 4.0


def _make_metal(spec, dark):
    """Give Gymnasium's humanoid pale metal, joints of the colour `dark` [4], and a visor."""
    import mujoco

    for body in spec.bodies[1:]:
        for geom in list(body.geoms):
            jointed = any(part in geom.name for part in ("waist", "hand", "foot"))
            geom.material = "clip_dark" if jointed else "clip_metal"
            geom.rgba = dark if jointed else [1, 1, 1, 1]
            if geom.name == "head":  # a visor, so that one sees which way the robot faces
                body.add_geom(
                    type=mujoco.mjtGeom.mjGEOM_ELLIPSOID,
                    pos=np.asarray(geom.pos) + [0.042, 0, 0.012],
                    size=[0.055, 0.066, 0.03],
                    material="clip_dark",
                    rgba=dark,
                    contype=0,
                    conaffinity=0,
                    mass=0,
                )


def write_video(path: str | Path, frames: np.ndarray, fps: float) -> None:
    """Write frames [T, H, W, 3] uint8 as an H.264 mp4 file, which gets its name when it is whole.
    The codec needs an even height and width: an odd one loses a line of pixels."""
    import imageio.v2 as imageio

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    even = frames[:, : frames.shape[1] // 2 * 2, : frames.shape[2] // 2 * 2]
    partial = path.with_name(".partial.mp4")
    options: dict = {"fps": fps, "macro_block_size": 2, "quality": 6, "ffmpeg_log_level": "quiet"}
    try:
        imageio.mimwrite(partial, list(even), format="FFMPEG", **options)
    except ImportError as error:
        raise UsageError(f"{path}: {message_of(error)}") from error
    partial.replace(path)


def add_video(writer: "SummaryWriter", tag: str, frames: np.ndarray, step: int, fps: float) -> None:
    """Write frames [T, H, W, 3] uint8 to a TensorBoard event file as an animated GIF. torch's
    add_video silently drops a video when it does not support the installed moviepy."""
    import imageio.v2 as imageio
    from tensorboard.compat.proto.summary_pb2 import Summary

    options: dict = {"format": "GIF", "duration": 1000 / fps, "loop": 0}
    gif = imageio.mimwrite("<bytes>", list(frames), **options)
    height, width = frames.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
    summary = Summary(value=[Summary.Value(tag=tag, image=image)])
    writer._get_file_writer().add_summary(summary, global_step=step)
