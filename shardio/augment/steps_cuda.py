"""The Triton kernels that run a step of a batch on CUDA. `shardio.augment.pixels_cuda` launches them.

Each program computes some pixels of one image by the operation of this image. `measure` makes lookup tables from counts
of gray levels, `blur_lines` blurs along the lines, and `step` does everything else.
"""

from __future__ import annotations

from shardio.augment.steps import FILL_AT, SAMPLING_AT, Op, Sampling
from shardio.augment.trusted import triton

if triton is not None:
    import triton.language as tl

# A row of numbers for each image and step, float64: the operation, its table or -1, and its values.
VALUES_AT = 2
# The values of BLUR: both sizes, and then, instead of the deviations, where the kernel finds its room and its weights.
ROOM_AT, TAPS_AT = 2, 3

MEASURED = (Op.CONTRAST, Op.AUTOCONTRAST, Op.EQUALIZE)

if triton is not None:
    _CONTRAST, _SATURATION, _HUE, _SHARPNESS = (
        tl.constexpr(int(op)) for op in (Op.CONTRAST, Op.SATURATION, Op.HUE, Op.SHARPNESS)
    )
    _AUTOCONTRAST, _EQUALIZE, _GRAYSCALE, _BLUR = (
        tl.constexpr(int(op)) for op in (Op.AUTOCONTRAST, Op.EQUALIZE, Op.GRAYSCALE, Op.BLUR)
    )
    _AFFINE, _PERSPECTIVE, _MIRROR, _FLIP = (
        tl.constexpr(int(op)) for op in (Op.AFFINE, Op.PERSPECTIVE, Op.MIRROR, Op.FLIP)
    )
    _NEAREST, _BILINEAR, _PILLOW_BICUBIC = (
        tl.constexpr(int(kind)) for kind in (Sampling.NEAREST, Sampling.BILINEAR, Sampling.PILLOW_BICUBIC)
    )
    _SAMPLING, _FILL, _ROOM, _TAPS = (tl.constexpr(at) for at in (SAMPLING_AT, FILL_AT, ROOM_AT, TAPS_AT))
    _VALUES = tl.constexpr(VALUES_AT)

    @triton.jit
    def _cut(x):  # type: ignore[no-untyped-def]
        """Returns `x` limited to 0 to 255 and rounded down, as floats. NaN becomes 0."""
        return tl.floor(tl.minimum(tl.maximum(x, 0.0), 255.0))

    @triton.jit
    def _rounded(x):  # type: ignore[no-untyped-def]
        """Returns `x` limited to 0 to 255 and rounded, halves to even: floats near 1.5 * 2^23 are whole numbers."""
        return (tl.minimum(tl.maximum(x, 0.0), 255.0) + 12582912.0) - 12582912.0

    @triton.jit
    def _gray(red, green, blue):  # type: ignore[no-untyped-def]
        """Returns the gray levels of colors, float32, rounded down. Sums use fma, as torch's `add` with alpha does."""
        red, green, blue = red.to(tl.float32), green.to(tl.float32), blue.to(tl.float32)
        return tl.floor(tl.fma(blue, 0.114, tl.fma(green, 0.587, red * 0.2989)))

    @triton.jit(do_not_specialize=["size"])  # type: ignore[untyped-decorator]
    def measure(  # type: ignore[no-untyped-def]
        pixels, rows, tables, size, ROW: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
    ):
        """Writes the lookup table of one channel of an image to `tables`, if the operation is one of MEASURED."""
        picture = (tl.program_id(0) // CHANNELS).to(tl.int64)
        channel = tl.program_id(0) % CHANNELS
        row = rows + picture * ROW
        code = tl.load(row).to(tl.int32)
        if (code == _CONTRAST) | (code == _AUTOCONTRAST) | (code == _EQUALIZE):
            image = pixels + picture * size * CHANNELS
            level = tl.arange(0, 256)
            counts = tl.zeros([256], tl.int32)
            for start in range(0, size, BLOCK):
                place = start + tl.arange(0, BLOCK)
                there = place < size
                at = image + place * CHANNELS
                if (CHANNELS == 3) & (code == _CONTRAST):
                    gray = _gray(
                        tl.load(at, mask=there, other=0),
                        tl.load(at + 1, mask=there, other=0),
                        tl.load(at + 2, mask=there, other=0),
                    ).to(tl.int32)
                else:
                    gray = tl.load(at + channel, mask=there, other=0).to(tl.int32)
                counts += tl.histogram(gray, 256)
            outside = tl.cdiv(size, BLOCK) * BLOCK - size  # these were counted as black
            counts -= tl.where(level == 0, outside, 0)
            least = tl.min(tl.where(counts > 0, level, 255), 0)
            most = tl.max(tl.where(counts > 0, level, 0), 0)
            x = level.to(tl.float32)
            if code == _CONTRAST:
                total = tl.sum(level.to(tl.int64) * counts, 0)
                mean = (total.to(tl.float64) / size).to(tl.float32)
                factor = tl.load(row + _VALUES)
                y = _cut(x * factor.to(tl.float32) + mean * (1.0 - factor).to(tl.float32))
            elif code == _AUTOCONTRAST:
                flat = least == most
                share = tl.where(flat, 1.0, (most - least).to(tl.float32) * (1.0 / 255))
                y = _cut(tl.div_rn(x - tl.where(flat, 0.0, least.to(tl.float32)), share + x * 0))
            else:  # Pillow's table: half a step more than the pixels below, divided by the step
                brightest = tl.sum(tl.where(level == most, counts, 0), 0)
                step = (size - brightest) // 255
                below = tl.cumsum(counts, 0) - counts
                made = tl.minimum((below + step // 2) // tl.maximum(step, 1), 255)
                y = tl.where(step == 0, level, made).to(tl.float32)
            table = tl.load(row + 1).to(tl.int64) * CHANNELS + channel
            tl.store(tables + table * 256 + level, y.to(tl.uint8))

    @triton.jit  # type: ignore[untyped-decorator]
    def _blurred(  # type: ignore[no-untyped-def]
        source, weights, size, line, place, limit, stride, channel, inside, CHANNELS: tl.constexpr
    ):
        """Returns pixels blurred along one axis, float32 (pixels, channels).

        `place` is the position of each pixel along the axis, from 0 to `limit` - 1. Position 0 is pixel `line` of
        `source`; neighbors are `stride` pixels apart. `weights` are `size` weights.
        """
        result = tl.zeros(inside.shape, tl.float32)
        for tap in range(size):
            # Outside, the image is mirrored, at most one image size beyond the edge.
            beside = tl.abs(place + tap - size // 2)
            beside = tl.where(beside >= limit, 2 * limit - 2 - beside, beside)
            at = line + tl.minimum(tl.maximum(beside, 0), limit - 1) * stride
            seen = tl.load(source + at[:, None] * CHANNELS + channel[None, :], mask=inside, other=0)
            result += seen.to(tl.float32) * tl.load(weights + tap)
        return result

    @triton.jit(do_not_specialize=["height", "width", "most_taps"])  # type: ignore[untyped-decorator]
    def blur_lines(  # type: ignore[no-untyped-def]
        pixels,
        rows,
        room,
        taps,
        height,
        width,
        most_taps,
        ROW: tl.constexpr,
        CHANNELS: tl.constexpr,
        PADDED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Writes images blurred along x to `room`, float32, where the operation is BLUR. `step` then blurs along y."""
        blocks = tl.cdiv(height * width, BLOCK)
        picture = (tl.program_id(0) // blocks).to(tl.int64)
        row = rows + picture * ROW
        if tl.load(row).to(tl.int32) == _BLUR:
            place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
            channel = tl.arange(0, PADDED)
            inside = (place < height * width)[:, None] & (channel < CHANNELS)[None, :]
            image = pixels + picture * (height * width * CHANNELS)
            values = row + _VALUES
            size = tl.load(values).to(tl.int32)
            weights = taps + tl.load(values + _TAPS).to(tl.int64) * 2 * most_taps
            x, line = place % width, place // width * width
            y = _blurred(image, weights, size, line, x, width, 1, channel, inside, CHANNELS)
            to = room + tl.load(values + _ROOM).to(tl.int64) * (height * width * CHANNELS)
            tl.store(to + place[:, None] * CHANNELS + channel[None, :], y, mask=inside)

    @triton.jit
    def _turned(red, green, blue, shift, channel):  # type: ignore[no-untyped-def]
        """Returns colors with the hue shifted by `shift`, a share of the color circle: float32 (pixels, channels)."""
        red, green, blue = red.to(tl.float32) / 255.0, green.to(tl.float32) / 255.0, blue.to(tl.float32) / 255.0
        most = tl.maximum(tl.maximum(red, green), blue)
        chroma = most - tl.minimum(tl.minimum(red, green), blue)
        divisor = tl.where(chroma == 0, 1.0, chroma)
        sixths = tl.where(
            most == red,
            (green - blue) / divisor,
            tl.where(most == green, 2.0 + (blue - red) / divisor, 4.0 + (red - green) / divisor),
        )
        hue = sixths / 6.0 + shift
        hue = hue - tl.floor(hue)
        phase = tl.where(channel == 0, 5.0, tl.where(channel == 1, 3.0, 1.0))
        place = phase[None, :] + (hue * 6.0)[:, None]
        place = tl.where(place >= 6.0, place - 6.0, place)
        share = tl.minimum(tl.maximum(tl.minimum(place, 4.0 - place), 0.0), 1.0)
        return _cut((most[:, None] - chroma[:, None] * share) * 255.999)

    @triton.jit  # type: ignore[untyped-decorator]
    def _sharpened(  # type: ignore[no-untyped-def]
        image, gray, factor, place, channel, inside, height, width, CHANNELS: tl.constexpr
    ):
        x, y = place % width, place // width
        middle = (x > 0) & (x < width - 1) & (y > 0) & (y < height - 1)
        there = middle[:, None] & inside
        sums = 4 * gray.to(tl.int32)
        for number in range(9):
            at = place + (number // 3 - 1) * width + number % 3 - 1
            sums += tl.load(image + at[:, None] * CHANNELS + channel[None, :], mask=there, other=0).to(tl.int32)
        smooth = ((2 * sums + 13) // 26).to(tl.float32)  # thirteenths, which are never halves, rounded
        return tl.where(there, _cut(gray + (smooth - gray) * (1.0 - factor).to(tl.float32)), gray)

    @triton.jit
    def _fixed(place, depth):  # type: ignore[no-untyped-def]
        """Returns place / depth in 2^-32 pixels, int64, halves to even. A division by 0 gives a place far outside."""
        place = place / depth
        place = tl.where(place == place, place, 16777216.0)
        place = tl.minimum(tl.maximum(place, -16777216.0), 16777216.0) * 4294967296.0
        # Beside 1.5 * 2^52 are whole numbers only, as from 2^52 on there are no others.
        whole = (place + 6755399441055744.0) - 6755399441055744.0
        return tl.where(tl.abs(place) < 2251799813685248.0, whole, place).to(tl.int64)

    @triton.jit
    def _places(values, x, y, code):  # type: ignore[no-untyped-def]
        """Returns the column and the row that pixels (x, y) of the result are read at, int64, in 2^-32 pixels."""
        a, b, c = tl.load(values), tl.load(values + 1), tl.load(values + 2)
        d, e, f = tl.load(values + 3), tl.load(values + 4), tl.load(values + 5)
        if code == _AFFINE:
            column = a.to(tl.int64) * x + b.to(tl.int64) * y + c.to(tl.int64)
            row = d.to(tl.int64) * x + e.to(tl.int64) * y + f.to(tl.int64)
        else:
            across, down = x.to(tl.float64) + 0.5, y.to(tl.float64) + 0.5
            depth = tl.load(values + 6) * across + tl.load(values + 7) * down + 1.0
            column, row = _fixed(a * across + b * down + c, depth), _fixed(d * across + e * down + f, depth)
        return column, row

    @triton.jit
    def _fraction(place):  # type: ignore[no-untyped-def]
        return ((place & 4294967295) >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24

    @triton.jit  # type: ignore[untyped-decorator]
    def _pixels_at(  # type: ignore[no-untyped-def]
        image, column, row, channel, inside, height, width, CHANNELS: tl.constexpr
    ):
        """Returns the pixels at `column` and `row`, int64 (pixels,), as float32 (pixels, channels).

        Positions outside of the image get the nearest pixel at its edge.
        """
        column = tl.minimum(tl.maximum(column, 0), width - 1).to(tl.int32)
        row = tl.minimum(tl.maximum(row, 0), height - 1).to(tl.int32)
        at = (row * width + column) * CHANNELS
        return tl.load(image + at[:, None] + channel[None, :], mask=inside, other=0).to(tl.float32)

    @triton.jit
    def _are_inside(column, row, height, width):  # type: ignore[no-untyped-def]
        return (column >= 0) & (column < width) & (row >= 0) & (row < height)

    @triton.jit
    def _cubic(number, d):  # type: ignore[no-untyped-def]
        """Returns the bicubic weight (Keys, a = -1) of pixel `number`, -1 to 2, at the position `d` after pixel 0."""
        near = tl.where(number == 0, 1.0 + d * d * (d - 2.0), d * (1.0 + d * (1.0 - d)))
        return tl.where(number == -1, d * (-1.0 + d * (2.0 - d)), tl.where(number == 2, d * d * (d - 1.0), near))

    @triton.jit  # type: ignore[untyped-decorator]
    def _sampled(  # type: ignore[no-untyped-def]
        image, values, column, row, channel, inside, height, width, CHANNELS: tl.constexpr
    ):
        """Returns gray levels, float32 (pixels, channels), read at `column` and `row`, int64, in 2^-32 pixels."""
        kind = tl.load(values + _SAMPLING).to(tl.int32)
        fill = tl.load(values + _FILL + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
        is_filled = (fill == fill)[None, :]
        fill = tl.where(fill == fill, fill, 0.0)[None, :]
        there = _are_inside(column >> 32, row >> 32, height, width)[:, None]
        result = tl.zeros(inside.shape, tl.float32)
        if kind == _NEAREST:
            seen = _pixels_at(image, column >> 32, row >> 32, channel, inside, height, width, CHANNELS)
            result = _rounded(tl.where(there, seen, fill))
        else:
            column -= 2147483648  # half a pixel
            row -= 2147483648
            right, low = _fraction(column), _fraction(row)
            column = column >> 32
            row = row >> 32
            if kind == _BILINEAR:
                covered = tl.zeros(right.shape, tl.float32)
                for number in range(4):
                    x, y = column + number % 2, row + number // 2
                    by_row = tl.where(number // 2 == 0, 1.0 - low, low)
                    by_column = tl.where(number % 2 == 0, 1.0 - right, right)
                    weight = tl.where(_are_inside(x, y, height, width), by_row * by_column, 0.0)
                    result += _pixels_at(image, x, y, channel, inside, height, width, CHANNELS) * weight[:, None]
                    covered += weight
                # With a fill, torchvision weighs what it has read twice; without one, it reads black outside.
                result = _rounded(tl.where(is_filled, (result - fill) * covered[:, None] + fill, result))
            else:
                first, last = tl.where(kind == _PILLOW_BICUBIC, -1, 0), tl.where(kind == _PILLOW_BICUBIC, 3, 2)
                for down in range(first, last):
                    line = tl.zeros(inside.shape, tl.float32)
                    for across in range(first, last):
                        linear = tl.where(across == 0, 1.0 - right, right)
                        weight = tl.where(kind == _PILLOW_BICUBIC, _cubic(across, right), linear)
                        seen = _pixels_at(image, column + across, row + down, channel, inside, height, width, CHANNELS)
                        line += seen * weight[:, None]
                    linear = tl.where(down == 0, 1.0 - low, low)
                    result += line * tl.where(kind == _PILLOW_BICUBIC, _cubic(down, low), linear)[:, None]
                result = _cut(tl.where(there, result, fill))
        return result

    @triton.jit(do_not_specialize=["height", "width", "most_taps"])  # type: ignore[untyped-decorator]
    def step(  # type: ignore[no-untyped-def]
        pixels,
        out,
        rows,
        tables,
        room,
        taps,
        affine,  # of each channel: what to multiply by, and what to add
        height,
        width,
        most_taps,
        ROW: tl.constexpr,
        CHANNELS: tl.constexpr,
        PADDED: tl.constexpr,
        BLOCK: tl.constexpr,
        STEPS: tl.constexpr,  # whether there is a step, or images are normalized and cast only
        NORMALIZE: tl.constexpr,
    ):
        """Writes BLOCK pixels of one image to `out`, after the image's operation, normalized if NORMALIZE is true."""
        blocks = tl.cdiv(height * width, BLOCK)
        picture = (tl.program_id(0) // blocks).to(tl.int64)
        place = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        channel = tl.arange(0, PADDED)
        inside = (place < height * width)[:, None] & (channel < CHANNELS)[None, :]
        first = picture * (height * width * CHANNELS)
        image = pixels + first
        at = place[:, None] * CHANNELS + channel[None, :]
        level = tl.load(image + at, mask=inside, other=0)
        gray = level.to(tl.float32)
        if STEPS:
            row = rows + picture * ROW
            code = tl.load(row).to(tl.int32)
            table = tl.load(row + 1).to(tl.int64)
            values = row + _VALUES
            if table >= 0:
                levels = tables + table * (CHANNELS * 256)
                found = tl.load(levels + channel[None, :] * 256 + level.to(tl.int32), mask=inside, other=0)
                gray = found.to(tl.float32)
            elif code == _BLUR:
                size = tl.load(values + 1).to(tl.int32)
                weights = taps + (tl.load(values + _TAPS).to(tl.int64) * 2 + 1) * most_taps
                lines = room + tl.load(values + _ROOM).to(tl.int64) * (height * width * CHANNELS)
                x, y = place % width, place // width
                gray = _rounded(_blurred(lines, weights, size, x, y, height, width, channel, inside, CHANNELS))
            elif code == _SHARPNESS:
                gray = _sharpened(image, gray, tl.load(values), place, channel, inside, height, width, CHANNELS)
            elif (code == _AFFINE) | (code == _PERSPECTIVE):
                column, line = _places(values, (place % width).to(tl.int64), (place // width).to(tl.int64), code)
                gray = _sampled(image, values, column, line, channel, inside, height, width, CHANNELS)
            elif (code == _MIRROR) | (code == _FLIP):
                x, y = place % width, place // width
                other = tl.where(code == _MIRROR, y * width + width - 1 - x, (height - 1 - y) * width + x)
                there = other[:, None] * CHANNELS + channel[None, :]
                gray = tl.load(image + there, mask=inside, other=0).to(tl.float32)
            # One channel is gray and has no hue; other numbers of channels are refused before.
            if CHANNELS == 3:  # noqa: SIM102
                if (code == _SATURATION) | (code == _GRAYSCALE) | (code == _HUE):
                    pixel = image + place * 3
                    seen = place < height * width
                    red = tl.load(pixel, mask=seen, other=0)
                    green = tl.load(pixel + 1, mask=seen, other=0)
                    blue = tl.load(pixel + 2, mask=seen, other=0)
                    factor = tl.load(values)
                    if code == _HUE:
                        gray = _turned(red, green, blue, factor.to(tl.float32), channel)
                    else:
                        same = _gray(red, green, blue)[:, None]
                        share = tl.where(code == _SATURATION, factor, 0.0)
                        gray = _cut(gray * share.to(tl.float32) + same * (1.0 - share).to(tl.float32))
        if NORMALIZE:
            factors = tl.load(affine + channel, mask=channel < CHANNELS, other=0.0)
            offsets = tl.load(affine + CHANNELS + channel, mask=channel < CHANNELS, other=0.0)
            gray = gray * factors[None, :] + offsets[None, :]
        tl.store(out + first + at, gray.to(out.dtype.element_ty), mask=inside)
