"""Paint the pictures in this folder, and variations of them to train tiny_clip on.

    python scenes/paint.py      # repaint sky, stone, metal, mountain_0.5, mountain_0.45 and car

egl_render.py only loads the pictures. You may replace any of them by another of the same shape:
sky.png is MuJoCo's six skybox faces from top to bottom (right, left, up, down, front, back),
stone.png and metal.png tile, car.png is CAR_SUPERSAMPLING times as large as it is shown, and a
mountain follows Gymnasium's hill, with the flag at the x in its name.
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import map_coordinates

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # for `python scenes/paint.py`

from egl_render import Scene
from environments.classic import CAR_HEIGHT, CAR_SUPERSAMPLING, MOUNTAIN_GOALS, SCALE, hill

CAR_WIDTH = 64  # pixels of a native frame
SPREADS = dict(tile=0.2, dark=0.2, sun_azimuth=0.9, sun_height=0.3, sun=0.2, ambient=0.15,
               headlight=0.3)  # fmt: skip


def variation(rng, seed):
    """Return (generator, around) to vary a scene with: around(value, spread) scales each number in
    `value` by a random factor within 1 +- `spread`. With rng=None it returns `value` unchanged, for
    the canonical scene, which is painted from `seed`."""

    def around(value, spread):
        value = np.asarray(value, float)[()]  # a single number becomes a scalar
        return value if rng is None else value * (1 + rng.uniform(-spread, spread, value.shape))

    return np.random.default_rng(seed) if rng is None else rng, around


def fractal_noise(rng, size, beta=1.7, cutoff=1.0):
    """Return periodic noise [size, size] float64 in [0, 1] with a 1/f^beta amplitude spectrum, made
    in the Fourier domain; wavelengths above 1/cutoff of the tile are left out."""
    frequency = np.hypot(*np.meshgrid(*[np.fft.fftfreq(size, 1 / size)] * 2))
    spectrum = np.fft.fft2(rng.standard_normal((size, size)))
    spectrum *= (frequency >= cutoff) / np.maximum(frequency, 1.0) ** beta
    noise = np.real(np.fft.ifft2(spectrum))
    low, high = np.quantile(noise, [0.01, 0.99])
    return np.clip((noise - low) / (high - low), 0.0, 1.0)


def mix(a, b, weight):
    weight = np.asarray(weight)[..., None]
    return np.asarray(a) * (1 - weight) + np.asarray(b) * weight


def smoothstep(x, low, high):
    t = np.clip((x - low) / (high - low), 0.0, 1.0)
    return t * t * (3 - 2 * t)


def as_bytes(rgb):
    return (np.clip(rgb, 0.0, 1.0) * 255).astype(np.uint8)


def sample(image, line, column):
    """Look up values of [H, W] at float coordinates, bilinearly and periodically."""
    return map_coordinates(image, [line, column], order=1, mode="grid-wrap")


def paint_look(rng=None):
    """Paint a textured MuJoCo scene, an `egl_render.Scene`. A np.random.Generator `rng` varies the
    scene (to train on); None gives the canonical one."""
    rng, around = variation(rng, seed=7)
    haze = around(Scene.haze, 0.06)
    # arguments are evaluated in this order, which fixes the order of the random draws
    return Scene(
        haze=haze,
        sky=sky_texture(rng, around(0.45, 0.6), haze, zenith=around((0.22, 0.43, 0.74), 0.15)),
        stone=stone_texture(rng, tint=around(0.56, 0.2) * around((1.07, 1.02, 0.93), 0.05)),
        metal=metal_texture(rng, tint=around(0.88, 0.08) * around((0.985, 0.995, 1.015), 0.02)),
        **{name: around(getattr(Scene, name), spread) for name, spread in SPREADS.items()},
    )


def stone_texture(rng, tint, size=1024, rows=6):
    """Paint periodic weathered flagstones in irregular courses: [size, size, 3] uint8."""
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
        cuts_x = (np.arange(columns) + rng.uniform(-0.3, 0.3, columns)) * size / columns
        cuts_x = np.sort(cuts_x + rng.uniform(0, size))
        mask = row == index
        inside = x[mask] % size
        slab = np.searchsorted(np.sort(cuts_x % size), inside) % columns
        tone[mask] = rng.uniform(-1, 1, columns)[slab]
        distance = np.abs((inside[:, None] - cuts_x + size / 2) % size - size / 2).min(-1)
        edge[mask] = np.minimum(edge[mask], distance)
    stain = fractal_noise(rng, size, 1.6, 2)
    grain = fractal_noise(rng, size, 0.6, 16)
    light = 1.0 + 0.11 * tone + 0.28 * (stain - 0.5) + 0.26 * (grain - 0.5)
    color = tint * light[..., None]
    color += 0.03 * tone[..., None] * np.array([1.0, 0.2, -0.8])  # warm and cold slabs
    moss = smoothstep(fractal_noise(rng, size, 1.5, 3), 0.62, 0.95) * 0.35
    color = mix(color, (0.36, 0.38, 0.27), moss)
    joint = 1.0 - smoothstep(edge, size * 0.002, size * 0.007)
    return as_bytes(mix(color, (0.24, 0.225, 0.20), joint * 0.8))


def metal_texture(rng, tint, size=128):
    """Paint pale brushed metal with faint wear: [size, size, 3] uint8."""
    brushed = np.repeat(rng.standard_normal((size, 1)), size, 1)
    wear = fractal_noise(rng, size, 1.3, 2)
    light = 1.0 + 0.02 * brushed + 0.12 * (wear - 0.5)
    return as_bytes(tint * light[..., None])


def sky_texture(rng, cover, haze, zenith, size=512):
    """Paint a cloudy sky over distant hills: [6 * size, size, 3] uint8, MuJoCo's six skybox faces
    (right, left, up, down, front, back). They are seamless, because the colour is one function of
    the direction. cover is the share of the sky covered by clouds, 0 to 1."""
    clouds = fractal_noise(rng, 512, 1.55, 2)
    ridge = 0.03 + 0.07 * np.interp(np.arange(0, 512, 0.25), np.arange(512), clouds[0], period=512)
    v, u = (np.mgrid[:size, :size] + 0.5) / size * 2 - 1
    one = np.ones_like(u)
    # Directions of each face's pixels, row 0 at the face's top, z up. MuJoCo shows the faces as if
    # seen from outside, so this world is mirrored (y to -y).
    sides = (one, -u, -v), (-one, u, -v), (u, v, one), (u, -v, -one), (u, one, -v), (-u, -one, -v)
    pictures = []
    for x, y, z in sides:
        norm = np.sqrt(x * x + y * y + z * z)
        x, y, z = x / norm, y / norm, z / norm
        up = np.clip(z, 0, 1)
        color = mix(haze, zenith, smoothstep(up, -0.05, 0.75))
        # clouds lie on a plane overhead: perspective makes them denser towards the horizon
        scale = 70.0 / (up + 0.18)
        column, line = x * scale, y * scale
        density = smoothstep(sample(clouds, line, column), 1.0 - cover - 0.22, 1.0 - cover + 0.3)
        shade = 0.80 + 0.20 * sample(clouds, line + 9, column + 6)
        cloud = np.stack([shade, shade, shade + 0.01], -1)
        color = mix(color, cloud, density * smoothstep(up, 0.0, 0.14) * 0.9)
        azimuth = (np.arctan2(y, x) / (2 * np.pi) * 2048).astype(int)
        for height, tone in ((1.0, (0.70, 0.78, 0.85)), (0.6, (0.52, 0.60, 0.60))):
            crest = height * ridge[(azimuth + int(900 * height)) % 2048]
            color = mix(color, haze * tone, smoothstep(crest - z, 0, 0.004) * 0.85)
        color = mix(color, haze * 0.93, smoothstep(-z, -0.015, 0.02))
        pictures.append(as_bytes(color))
    return np.concatenate(pictures)


def ellipse(x, y, center_x, center_y, radius_x, radius_y):
    """Return the approximate signed distance to an ellipse in units of x; negative inside."""
    radius = np.hypot((x - center_x) / radius_x, (y - center_y) / radius_y)
    return (radius - 1) * min(radius_x, radius_y)


def inside(distance, pixels=2):
    """Return how much of each pixel is inside, 0 to 1; `pixels` is pixels per unit of distance."""
    return np.clip(0.5 - pixels * distance, 0, 1)


def car_sprite():
    """Paint a red car from the side, facing right, CAR_SUPERSAMPLING times as large: [H, W, 4]."""
    step = 1 / CAR_SUPERSAMPLING
    y, x = np.mgrid[0 : CAR_HEIGHT + 4 : step, 0 : CAR_WIDTH + 4 : step] - 2  # 2 px of margin
    y = CAR_HEIGHT - y  # upwards from the ground
    red = np.array((0.80, 0.07, 0.06)) * (0.62 + 0.55 * smoothstep(y, 6, 21))[..., None]
    body = np.maximum.reduce([np.abs(x - 32) - 31, 5 - y, y - 17 + ((x - 32) / 34) ** 4 * 4])
    roof = np.interp(x[0], [11, 21, 40, 51], [16, 28, 28.5, 16])  # windscreens slope
    cabin = np.maximum(y - roof - 0.8 * np.sin(np.clip((x - 16) / 30, 0, 1) * np.pi), 14 - y)
    glass = np.array((0.20, 0.27, 0.33)) + 0.4 * smoothstep(y - 0.4 * x, 4, 14)[..., None]
    window = np.maximum(np.maximum(cabin * 0.7 + 2.6, 17.5 - y), 1.1 - np.abs(x - 31.5))
    parts = [
        (np.maximum(cabin * 0.7, np.abs(x - 31) - 20), red),
        (body, red),
        (window, glass),
        (np.maximum(np.abs(y - 12.2) - 0.35, np.abs(x - 32) - 28), (0.45, 0.03, 0.03)),
        (ellipse(x, y, 61, 13.5, 2.2, 2.0), (1.0, 0.97, 0.80)),
        (ellipse(x, y, 2.4, 13.5, 1.6, 2.2), (0.98, 0.45, 0.10)),
    ]
    arch, tyre = (8.6, (0.16, 0.02, 0.02)), (7.2, (0.06, 0.06, 0.065))
    for radius, paint in (arch, tyre, (4.2, (0.70, 0.71, 0.73)), (1.4, (0.25, 0.25, 0.26))):
        parts += [(ellipse(x, y, center, 7, radius, radius), paint) for center in (14, 50)]
    color, alpha = np.array((0.45, 0.05, 0.04)), 0.0  # what shines through at the edges
    for distance, paint in parts:
        part = inside(distance, CAR_SUPERSAMPLING)
        color, alpha = mix(color, paint, part), np.maximum(alpha, part)
    return as_bytes(np.dstack([color, alpha]))


def mountain_scene(rng=None, goal=0.5):
    """Paint MountainCar's hill as a landscape with a flag at x = goal: [600, 600, 3] uint8, varied
    by `rng` as in `paint_look`. Rows 100 to 500 are Gymnasium's native picture. The landscape is
    rendered at twice the size from a height field, front to back."""
    varied = rng is not None
    rng, around = variation(rng, seed=11)
    size, depth = 1200, 500  # pixels across, samples from the crest (0) to the viewer
    scale = 2 * SCALE
    row, column = np.mgrid[:size, :size].astype(float)
    height = (1000 - row) / scale  # in units of hill(); the native picture's bottom line is 0
    x = -1.2 + column / scale
    haze, zenith = around((0.80, 0.86, 0.91), 0.05), around((0.20, 0.40, 0.70), 0.15)

    # Sky: clouds lie on a plane overhead, so that they get denser towards the horizon
    noise = fractal_noise(rng, 1024, 1.5, 3)
    up = np.clip((height - 0.25) / 1.3, 0, None)
    color = mix(haze, zenith, np.minimum(up, 1) ** 0.7)
    distance = 130 / (up + 0.22)
    u, v = (column - 600) / 600 * distance + 300, 2.2 * distance
    cover = around(0.52, 0.4)
    density = smoothstep(sample(noise, v, u), 1 - cover - 0.05, 1 - cover + 0.33)
    lit = smoothstep(sample(noise, v, u) - sample(noise, v + 14, u + 10), -0.12, 0.12)
    cloud = (0.78 + 0.22 * lit)[..., None] * np.array((1.0, 1.0, 1.01))
    color = mix(color, cloud, density * smoothstep(up, 0.0, 0.22) * 0.92)

    # Distant ranges, the farther the bluer
    for base, relief, air in ((0.52, 0.34, 0.70), (0.36, 0.30, 0.48)):
        line = fractal_noise(rng, 512, 2.1, 2)[0]
        line = line + 0.05 * fractal_noise(rng, 512, 1.5, 12)[0]
        crest = base + relief * np.interp(np.arange(size) * 0.4, np.arange(512), line)
        rough = np.tile(fractal_noise(rng, 600, 1.75, 5), (2, 2))
        light = np.clip(0.60 + 1.5 * (rough - np.roll(rough, (5, 9), (0, 1))), 0.1, 1.3)
        rock = np.array((0.42, 0.44, 0.47)) * light[..., None]
        snow = smoothstep(height + 0.16 * (rough - 0.5), 0.62, 0.68)
        rock = mix(rock, np.array((0.93, 0.95, 0.98)) * (0.5 + 0.5 * light)[..., None], snow)
        rock = mix(rock, haze * (0.93, 0.96, 1.0), air)
        color = mix(color, rock, smoothstep(crest - height, 0, 0.004))

    # The mountain: a height field z [depth, size] that falls from the crest hill(x) to a meadow.
    # Ridged noise makes spurs and gullies; it vanishes at the crest, which the car drives on.
    near = np.linspace(0, 1, depth)[:, None]
    crest = hill(x[0])[None]
    warp = fractal_noise(rng, size, 1.9, 3)[:depth] * 150
    ridged = np.zeros((depth, size))
    line, place = np.mgrid[:depth, :size].astype(float)
    for stretch, weight in ((0.55, 1.0), (1.3, 0.42), (2.7, 0.16)):
        layer = fractal_noise(rng, 512, 2.35, 3)
        along, across = line * 0.8 + 0.35 * place + warp, 0.42 * place + warp
        value = sample(layer, along * stretch, across * stretch)
        ridged += weight * (1 - np.abs(2 * value - 1))
    ridged = ridged / 1.58 - 0.5
    meadow = 0.02 + 0.05 * (warp / 150 - 0.5)
    fall = 1 - smoothstep(near, -0.25, 0.95)
    fall = fall / fall[0]
    steep = np.clip(crest * 1.1, 0.1, 1)
    z = meadow * (1 - fall) + crest * fall
    rough = smoothstep(near, 0, 0.25) * (0.12 + 0.88 * smoothstep(fall, 0, 0.5))
    z = z + 0.34 * ridged * steep * rough
    tilt = 0.36
    seen = np.minimum(z - tilt * near, crest - 0.002 * near)  # nothing rises above the crest
    z = seen + tilt * near

    # Light: Lambert with the sun from the upper left, plus sky; hollows are darker
    slope_y, slope_x = np.gradient(z, 1.3 / depth, 1 / scale)
    normal = np.stack([-slope_x, -slope_y, np.ones_like(z)])
    normal /= np.linalg.norm(normal, axis=0)
    azimuth = rng.uniform(-0.5, 0.5) if varied else 0.0
    sun = np.array((-0.72 * np.cos(azimuth), 0.35 - 0.3 * np.sin(azimuth), 0.60))
    sun /= np.linalg.norm(sun)
    light = np.clip(np.tensordot(sun, normal, 1), 0, 1)
    # shadows: march towards the sun along each line of equal depth
    shadow = np.full_like(z, -np.inf)
    for step in range(4, 160, 6):
        blocker = np.roll(z, step, 1) - step / scale * 0.75
        blocker[:, :step] = -np.inf
        shadow = np.maximum(shadow, blocker)
    light *= 1 - 0.75 * smoothstep(shadow - z, 0.0, 0.02)

    down = 350 * near - 550 * z  # roughly the distance along the surface: no streaks on cliffs
    grain = sample(fractal_noise(rng, 1024, 0.75, 20), down, place)
    patch = sample(fractal_noise(rng, 1024, 1.35, 6), down, place)
    strata = 0.5 + 0.5 * np.sin(70 * (z + 0.10 * x[:1] + 0.05 * patch))
    tone = 0.57 + 0.34 * patch + 0.30 * grain + 0.10 * strata
    ground = np.array((0.47, 0.43, 0.39)) * tone[..., None]
    grass = np.array((0.30, 0.40, 0.13)) * (0.62 + 0.5 * patch + 0.55 * (grain - 0.5))[..., None]
    grass = mix(grass, (0.52, 0.49, 0.22), smoothstep(patch, 0.6, 0.95) * 0.5)
    green = smoothstep(0.40 - z + 0.30 * (patch - 0.5) + 0.22 * (normal[2] - 0.6), -0.03, 0.07)
    ground = mix(ground, grass, green)
    scree = smoothstep(patch - 0.2 * normal[2], 0.42, 0.6) * (1 - green) * 0.35
    ground = mix(ground, (0.56, 0.53, 0.50), scree)
    snow = smoothstep(z + 0.22 * (patch - 0.5) + 0.20 * (normal[2] - 0.55), 0.70, 0.76)
    snow *= smoothstep(normal[2], 0.20, 0.36)
    ground = mix(ground, (0.95, 0.97, 1.0), snow)
    ground *= light[..., None] * np.array((1.05, 0.99, 0.90)) + np.array((0.30, 0.34, 0.42))

    # Project: in each column, a pixel shows the nearest sample that reaches its height
    visible = np.maximum.accumulate(seen[::-1], 0)  # from the viewer to the crest
    for i in range(size):
        index = np.searchsorted(visible[:, i], height[:, i])
        hit = index < depth
        color[hit, i] = ground[depth - 1 - index[hit], i]
    # A yellow flag on a pole; u, v in pixels of a native frame
    u, v = (x - goal) * SCALE, (height - hill(goal)) * SCALE
    cloth = np.maximum(np.abs(u - 16.5) - 15.5, np.abs(v - 45 + 2.0 * np.sin(u / 6.0)) - 11)
    folds = np.array((1.0, 0.83, 0.05)) * (0.90 + 0.14 * np.cos(u / 6.0 + 0.6))[..., None]
    pole = np.maximum(np.abs(u) - 1.5, np.abs(v - 28) - 31)
    color = mix(mix(color, folds, inside(cloth)), (0.85, 0.85, 0.83), inside(pole))
    return as_bytes(color.reshape(600, 2, 600, 2, 3).mean((1, 3)))


def main():
    look = paint_look()
    pictures = {"sky": look.sky, "stone": look.stone, "metal": look.metal, "car": car_sprite()}
    pictures |= {f"mountain_{goal}": mountain_scene(goal=goal) for goal in MOUNTAIN_GOALS.values()}
    for name, picture in pictures.items():
        Image.fromarray(picture).save(HERE / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
