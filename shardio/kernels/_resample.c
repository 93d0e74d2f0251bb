/* Resamples boxes of images to one size, with the same bytes as the operations of torch in tests/support/resampling_by_torch.py
   and tests/conversion/test_fit.py. Lines come first: each output is a sum of pixels times weights of 16 bits, or with WIDE of
   32, as Pillow has them, rounded to a byte. Then the same along the columns. A line is resampled when the next line of the output needs it, and an output line
   is normalized and cast when it is written, so no image in between is ever in memory. RGB is one plane of three channels;
   yuv420 is three planes of one channel, and a line of RGB is made of a line of each. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"

#define INLINE static inline __attribute__((always_inline))

/* Lines that are resampled at once, and the most outputs of each. */
#define ROWS 4
#define MOST_GROUP 16
/* Outputs whose weights are found at once. */
#define BLOCK 32
/* Of a weight of 32 bits, those behind the point: Pillow's PRECISION_BITS. */
#define WIDE_BITS 22
/* What a load may reach beyond the bytes that are wanted, and a store beyond a line. */
#define SLACK 32
#define CACHE_LINE 64
#define MOST_SIDE ((int64_t)1 << 20)
#define MOST_CHANNELS 64
#define MOST_PLANES 3

/* What an output line is made of: bytes, or numbers after normalizing. */
enum depth { UINT8, FLOAT32, BFLOAT16, FLOAT16 };

INLINE size_t itemsize_of(enum depth depth)
{
    return depth == UINT8 ? 1 : depth == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

/* One axis of an image: output number i is centered at start + scale * (i + 1/2), in pixels of the image, and the filter
   sees pixels from `low` to before `high`. */
struct axis {
    double start, scale, low, high;
};

enum { TOP, LEFT, HEIGHT, WIDTH, NUM_SIDES };
enum { ALONG_ROWS, ALONG_COLUMNS, NUM_AXES };

struct job {
    const uint8_t *pixels;    /* memory with the windows */
    const int64_t *places;    /* the first byte of each window */
    size_t stride;            /* the bytes from line to line of all windows; 0: each is packed, and memory is all ours */
    const int64_t *windows;   /* of each image the part that is there: its first row and column, height and width */
    const struct axis *axes;  /* two of each image, for its rows and for its columns */
    const uint8_t *flags;     /* of each image MIRRORED or 0, WIDE or 0, and CUBIC, LANCZOS, BOX or 0 */
    const float *affine;      /* a factor for each channel, then an offset for each; NULL for bytes */
    void *out;
    const int64_t *lines; /* which image of `out` each becomes; or NULL: one after the other */
    size_t count, channels, nbytes; /* `nbytes` of `pixels` */
    int halved; /* images are yuv420, and results are RGB */
    /* Of all outputs along an axis, numbers `first` to `first + size` are written. Those that do not exist are black. */
    int64_t resized[NUM_AXES], first[NUM_AXES], size[NUM_AXES];
    int64_t most[NUM_AXES]; /* the largest height and width of a window */
    int radius, antialias; /* the widest radius of a filter */
    enum depth depth;
};

enum { MIRRORED = 1, CUBIC = 2, LANCZOS = 4, BOX = 8, WIDE = 16 };

static const struct guard *guard;

/* What the taps of an image depend on: images often have those of the image before. All is compared, so there are no bytes
   between the fields. */
struct need {
    struct axis axis;
    int64_t origin; /* the first row or column of the window */
    int64_t flip, reach, places /* of 16 bits, that a weight takes */;
};

/* What the outputs along one axis are made of. Output number k is a sum of `count` inputs, an even number, from input
   number firsts[k] of the window on. Inputs that it does not need have a weight of 0, and may lie beyond the last. There is
   room for `most` weights of each output. */
struct taps {
    int along, halved;  /* which axis; of a plane with half the rows and columns */
    size_t channels;    /* of the plane */
    struct need need;
    size_t before, kept; /* how many outputs do not exist, and then how many do */
    size_t count, most, end /* behind the last input of all */;
    uint32_t *firsts;
    int precision; /* weights are in units of 2^-precision */
    int same;      /* outputs are inputs */
    int16_t *weights;
    double *exact;    /* weights before they are rounded, of BLOCK outputs after those of BLOCK others */
    uint32_t *groups; /* all of this as the form "avx2" has it, */
    int layout;       /* in one of several ways */
};

/* How far the filter of an image reaches. The radius also says which filter it is: 0 is the box, which reaches a half. */
INLINE int filter_radius(uint8_t flags)
{
    return flags & BOX ? 0 : flags & LANCZOS ? 3 : flags & CUBIC ? 2 : 1;
}

static double lanczos(double x)
{
    const double pi = 3.14159265358979323846;
    return x == 0 ? 1 : x < 3 ? sin(x * pi) / (x * pi) * (sin(x / 3 * pi) / (x / 3 * pi)) : 0;
}

INLINE double filter(int radius, double a, double x)
{
    if (radius == 0)
        return x > -0.5 && x <= 0.5;
    x = fabs(x);
    if (radius == 1)
        return 1 - x > 0 ? 1 - x : 0;
    if (radius == 3)
        return lanczos(x);
    /* Keys, "Cubic convolution interpolation for digital image processing", 1981; the operations in torch's order. */
    double near = ((a + 2) * x - (a + 3)) * x * x + 1, far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
    return x < 1 ? near : x < 2 ? far : 0;
}

INLINE double clamp(double x, double least, double most)
{
    x = x > least ? x : least;
    return x < most ? x : most;
}

INLINE double radius_of(const struct job *job, double scale)
{
    return job->radius * (job->antialias && scale > 1 ? scale : 1);
}

/* Of numbers below 2^51, by operations that every processor has for several numbers at once. */
INLINE double floor_of(double x)
{
    double big = 0x1.8p52, whole = (x + big) - big;
    return whole - (whole > x ? 1 : 0);
}

/* The weights of BLOCK outputs, number `number` and every `step` from there. Numbers that do not exist are taken for the
   nearest that do. Of output j, input number from[j] + t has the weight weights[t * BLOCK + j]. Returns how many inputs an
   output has, at most, and raises `largest` to the largest weights.

   As Pillow and torch have it: the filter is as wide as what it shrinks, and what it may not see is left out. Without
   antialias, the filter is as wide as when nothing shrinks, and the pixels at the edge go on. */
INLINE size_t weigh(double *weights, size_t most, double *from, double *to, double *largest, const struct axis *axis,
                    double number, double step, double last, int reach, int antialias)
{
    double shrink = antialias && axis->scale > 1 ? axis->scale : 1, radius = (reach ? reach : 0.5) * shrink;
    double start = axis->start, scale = axis->scale, low = axis->low, high = axis->high;
    double a = antialias ? -0.5 : -0.75, inverse = 1 / shrink;
    double center[BLOCK], begin[BLOCK], stop[BLOCK], total[BLOCK] = {0};
    int32_t width[BLOCK], widest = 0;
    for (int j = 0; j < BLOCK; j++) {
        center[j] = start + scale * (clamp(number + step * j, 0, last) + 0.5);
        begin[j] = floor_of(center[j] - radius + 0.5);
        stop[j] = floor_of(center[j] + radius + 0.5);
        from[j] = clamp(begin[j], low, high - 1);
        to[j] = clamp(clamp(stop[j], from[j] + 1, high), 0, from[j] + (double)most);
        width[j] = (int32_t)(to[j] - from[j]);
    }
    for (int j = 0; j < BLOCK; j++)
        widest = width[j] > widest ? width[j] : widest;
    memset(weights, 0, most * BLOCK * sizeof(double));
    double *some = weights;
    for (int t = 0; antialias && t < widest; t++, some += BLOCK)
        for (int j = 0; j < BLOCK; j++) {
            double at = from[j] + t, weight = filter(reach, a, (at - center[j] + 0.5) * inverse);
            some[j] = at < to[j] ? weight : 0;
            total[j] += some[j];
        }
    for (int j = 0; !antialias && j < BLOCK; j++)
        for (double at = begin[j]; at < stop[j]; at++) {
            double weight = filter(reach, a, at - center[j] + 0.5);
            weights[(int)(clamp(at, from[j], to[j] - 1) - from[j]) * BLOCK + j] += weight;
            total[j] += weight;
        }
    for (int j = 0; j < BLOCK; j++) {
        weights[j] = total[j] == 0 ? 1 : weights[j]; /* a box of less than a pixel */
        total[j] = total[j] == 0 ? 1 : total[j];
    }
    for (int t = 0; t < widest; t++, weights += BLOCK)
        for (int j = 0; j < BLOCK; j++) {
            weights[j] /= total[j];
            largest[j] = fabs(weights[j]) > largest[j] ? fabs(weights[j]) : largest[j];
        }
    return (size_t)widest;
}

/* All outputs decide together how many bits a weight has, so all are weighed, those that are not written, too. */
INLINE void find_weights(struct taps *taps, const struct axis *axis, int64_t origin, int64_t resized, int64_t first,
                         int flip, int reach, int antialias)
{
    const int64_t kept = (int64_t)taps->kept, before = flip ? resized - first - kept : first;
    const double start = (double)(flip ? first + kept - 1 : first), step = flip ? -1 : 1;
    double largest[BLOCK] = {0}, highest = 0, from[BLOCK], to[BLOCK];
    taps->count = taps->end = 0;
    /* Blocks begin where the outputs that are kept do. Behind these, there is room for one block. */
    for (int64_t at = -((before + BLOCK - 1) / BLOCK * BLOCK); at < resized - before; at += BLOCK) {
        int is_kept = at >= 0 && at < kept;
        size_t k = (size_t)(is_kept ? at : (kept + BLOCK - 1) / BLOCK * BLOCK);
        size_t count = weigh(taps->exact + k * taps->most, taps->most, from, to, largest, axis, start + step * (double)at,
                             step, (double)(resized - 1), reach, antialias);
        for (size_t j = 0; is_kept && j < BLOCK; j++)
            taps->firsts[k + j] = (uint32_t)(int32_t)(from[j] - (double)origin);
        size_t end = (size_t)((int64_t)to[flip ? 0 : BLOCK - 1] - origin);
        taps->count = is_kept && count > taps->count ? count : taps->count;
        taps->end = is_kept && end > taps->end ? end : taps->end;
    }
    for (int j = 0; j < BLOCK; j++)
        highest = largest[j] > highest ? largest[j] : highest;
    taps->precision = 0;
    while (taps->precision < 22 && 0.5 + highest * (double)(1 << (taps->precision + 1)) < 1 << 15)
        taps->precision++;
    taps->count = (taps->count + 1) / 2 * 2;
    double unit = (double)(1 << taps->precision);
    for (size_t k = 0; k < taps->kept; k += BLOCK)
        for (size_t t = 0; t < taps->count; t++) {
            int16_t rounded[BLOCK];
            for (size_t j = 0; j < BLOCK; j++) {
                double weight = taps->exact[k * taps->most + t * BLOCK + j] * unit;
                rounded[j] = (int16_t)(weight + (weight < 0 ? -0.5 : 0.5));
            }
            for (size_t j = 0; j < BLOCK; j++)
                taps->weights[(k + j) * taps->count + t] = rounded[j];
        }
}

/* The weights once more, in 32 bits. */
static void widen(struct taps *taps)
{
    for (size_t k = 0; k < taps->kept * taps->count; k++) {
        size_t output = k / taps->count, block = output / BLOCK * BLOCK;
        double weight = taps->exact[block * taps->most + k % taps->count * BLOCK + output - block] * (1 << WIDE_BITS);
        ((int32_t *)taps->weights)[k] = (int32_t)(weight + (weight < 0 ? -0.5 : 0.5));
    }
}

INLINE void find_any(struct taps *taps, const struct job *job)
{
    const struct axis *axis = &taps->need.axis;
    const int64_t origin = taps->need.origin, resized = job->resized[taps->along], *start_of = job->first + taps->along;
    int64_t first = *start_of > 0 ? *start_of : 0, end = *start_of + job->size[taps->along];
    taps->before = (size_t)(first - *start_of);
    taps->kept = (size_t)((end < resized ? end : resized) - first);
    int reach = (int)taps->need.reach, flip = (int)taps->need.flip;
    size_t places = (size_t)taps->need.places;
    taps->same = axis->scale == 1 && axis->start == floor(axis->start);
    if (taps->same) {
        size_t start = (size_t)((int64_t)axis->start + first - origin);
        taps->count = 1;
        taps->end = start + taps->kept;
        for (size_t k = 0; k < taps->kept; k++)
            taps->firsts[k] = (uint32_t)(start + (flip ? taps->kept - 1 - k : k));
    } else if (!job->antialias) {
        find_weights(taps, axis, origin, resized, first, flip, reach, 0);
    } else if (reach == 0) {
        find_weights(taps, axis, origin, resized, first, flip, 0, 1);
    } else if (reach == 1) {
        find_weights(taps, axis, origin, resized, first, flip, 1, 1);
    } else if (reach == 2) {
        find_weights(taps, axis, origin, resized, first, flip, 2, 1);
    } else {
        find_weights(taps, axis, origin, resized, first, flip, 3, 1);
    }
    if (places == 2 && !taps->same)
        widen(taps);
    /* Outputs are made in groups. */
    for (size_t k = taps->kept; k < taps->kept + MOST_GROUP; k++) {
        taps->firsts[k] = taps->firsts[taps->kept - 1];
        memset(taps->weights + k * taps->count * places, 0, taps->count * places * sizeof(int16_t));
    }
}

static void find_taps(struct taps *taps, const struct job *job)
{
    find_any(taps, job);
}

/* How a line of bytes is normalized: a factor and an offset for each of its values. `has_ties` is 1 if one of the results
   is as far from one bfloat16 as from another. */
struct affine {
    float *factors, *offsets;
    int has_ties;
};

/* The forms of the kernel. All give the same bytes. */

typedef void taps_of(struct taps *taps, const struct job *job);
typedef void lines_of(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns, size_t channels);
typedef void line_of(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count, int precision,
                     size_t nbytes);
/* A line of bytes: one + (other - one) * share / 2^15, rounded. The share is less than 1. */
struct blend {
    const uint8_t *one, *other;
    int share;
};

typedef void rgb_of(uint8_t *to, const struct blend *lines, size_t count);
typedef void yuv_of(uint8_t *const *to, const uint8_t *from, size_t width);
typedef void cast_of(void *to, const uint8_t *from, const struct affine *affine, size_t n, enum depth depth);

struct form {
    const char *name;
    taps_of *find_taps;
    lines_of *resample_lines; /* ROWS lines of an image, along themselves. They may be read beyond the last tap. Then come
                                 those that are next. */
    line_of *join_lines;      /* an output line, from an even number of lines. Nothing is written beyond nbytes. */
    rgb_of *to_rgb;           /* `count` pixels, from lines of Y, Cb and Cr. SLACK bytes more of these may be read. */
    yuv_of *to_yuv;           /* two lines of RGB, an even number of pixels, to two of Y and one each of Cb and Cr */
    cast_of *cast;            /* a line of bytes, times a factor plus an offset */
};

INLINE uint8_t to_byte(int32_t sum, int precision)
{
    sum >>= precision;
    return (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
}

INLINE int32_t weight_of(const int16_t *weights, size_t k, size_t places)
{
    return places == 2 ? ((const int32_t *)weights)[k] : weights[k];
}

INLINE void resample_any(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns, size_t channels,
                         int precision, size_t places)
{
    for (size_t row = 0; row < ROWS; row++)
        for (size_t x = 0; x < columns->kept; x++) {
            const uint8_t *pixels = from[row] + columns->firsts[x] * channels;
            const int16_t *weights = columns->weights + x * columns->count * places;
            for (size_t c = 0; c < channels; c++) {
                int32_t sum = 1 << precision >> 1;
                for (size_t k = 0; k < columns->count; k++)
                    sum += weight_of(weights, k, places) * pixels[k * channels + c];
                to[row][x * channels + c] = to_byte(sum, precision);
            }
        }
}

INLINE void join_any(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count, int precision,
                     size_t nbytes, size_t places)
{
    for (size_t at = 0; at < nbytes; at++) {
        int32_t sum = 1 << precision >> 1;
        for (size_t k = 0; k < count; k++)
            sum += weight_of(weights, k, places) * lines[k][at];
        to[at] = to_byte(sum, precision);
    }
}

static void resample_lines(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns, size_t channels)
{
    resample_any(to, from, columns, channels, columns->precision, 1);
}

static void join_lines(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count, int precision,
                       size_t nbytes)
{
    join_any(to, lines, weights, count, precision, nbytes, 1);
}

/* Of one picture at a time, while a set is made: no form for a processor is needed. */
static void resample_wide(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns, size_t channels)
{
    if (channels == 3)
        resample_any(to, from, columns, 3, WIDE_BITS, 2);
    else
        resample_any(to, from, columns, channels, WIDE_BITS, 2);
}

static void join_wide(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count, int precision,
                      size_t nbytes)
{
    (void)precision;
    join_any(to, lines, weights, count, WIDE_BITS, nbytes, 2);
}

/* Whether two lines are joined as they are blended: the sum of their weights is 1, and none is negative. */
INLINE int blends(const int16_t *weights, size_t count, int precision)
{
    return count == 2 && weights[0] >= 0 && weights[1] >= 0 && weights[0] + weights[1] == 1 << precision;
}

INLINE struct blend blend_of(const uint8_t *const *lines, const int16_t *weights, int precision)
{
    if (!weights[0])
        return (struct blend){lines[1], lines[1], 0};
    return (struct blend){lines[0], lines[1], weights[1] << (15 - precision)};
}

INLINE int32_t blended(const struct blend *line, size_t i)
{
    return line->one[i] + (((line->other[i] - line->one[i]) * line->share + (1 << 14)) >> 15);
}

/* Full range BT.601, as in JPEG files. */
static void to_rgb(uint8_t *to, const struct blend *lines, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        int32_t y = blended(lines, i), cb = blended(lines + 1, i) - 128, cr = blended(lines + 2, i) - 128;
        to[3 * i] = to_byte(y + ((45941 * cr + (1 << 14)) >> 15), 0);
        to[3 * i + 1] = to_byte(y + ((-11277 * cb - 23401 * cr + (1 << 14)) >> 15), 0);
        to[3 * i + 2] = to_byte(y + ((58065 * cb + (1 << 14)) >> 15), 0);
    }
}

/* A Cb or Cr is of the sums of four pixels, and is rounded once. In loops that compilers make vectors of. */
INLINE void yuv_from(uint8_t *const *to, const uint8_t *from, size_t width)
{
    enum { SOME = 64 };
    const int32_t middle = (128 << 18) + (1 << 17);
    for (size_t x = 0; x < width; x += SOME) {
        const size_t some = width - x < SOME ? width - x : SOME;
        uint8_t colors[3][SOME], *restrict cb = to[2] + x / 2, *restrict cr = to[3] + x / 2;
        uint16_t sums[3][SOME];
        for (size_t row = 0; row < 2; row++) {
            const uint8_t *pixels = from + 3 * (row * width + x);
            uint8_t *restrict y = to[row] + x;
            for (size_t i = 0; i < some; i++)
                colors[0][i] = pixels[3 * i], colors[1][i] = pixels[3 * i + 1], colors[2][i] = pixels[3 * i + 2];
            for (size_t i = 0; i < some; i++)
                y[i] = (uint8_t)((19595 * colors[0][i] + 38470 * colors[1][i] + 7471 * colors[2][i] + 0x8000) >> 16);
            for (size_t c = 0; c < 3; c++)
                for (size_t i = 0; i < some; i++)
                    sums[c][i] = (uint16_t)((row ? sums[c][i] : 0) + colors[c][i]);
        }
        for (size_t i = 0; i < some / 2; i++) {
            int32_t red = sums[0][2 * i] + sums[0][2 * i + 1], green = sums[1][2 * i] + sums[1][2 * i + 1];
            int32_t blue = sums[2][2 * i] + sums[2][2 * i + 1];
            cb[i] = to_byte(middle - 11059 * red - 21709 * green + 32768 * blue, 18);
            cr[i] = to_byte(middle + 32768 * red - 27439 * green - 5329 * blue, 18);
        }
    }
}

static void to_yuv(uint8_t *const *to, const uint8_t *from, size_t width)
{
    yuv_from(to, from, width);
}

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* The nearest number of 16 bits, of two the even one. */
INLINE uint16_t to_bfloat16(float x)
{
    uint32_t bits = bits_of(x);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_float16(float x)
{
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x47800000) /* 65536 and more */
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* less than 2^-14: a whole number of 2^-24, rounded by an addition */
        float magnitude;
        memcpy(&magnitude, &rest, sizeof magnitude);
        return (uint16_t)(sign | (bits_of(magnitude + 0.5f) - bits_of(0.5f)));
    }
    return (uint16_t)(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

INLINE void cast_from(size_t i, void *to, const uint8_t *from, const struct affine *affine, size_t n, enum depth depth)
{
    for (; i < n; i++) {
        float value = (float)from[i] * affine->factors[i] + affine->offsets[i];
        if (depth == FLOAT32)
            ((float *)to)[i] = value;
        else
            ((uint16_t *)to)[i] = depth == BFLOAT16 ? to_bfloat16(value) : to_float16(value);
    }
}

static void cast(void *to, const uint8_t *from, const struct affine *affine, size_t n, enum depth depth)
{
    cast_from(0, to, from, affine, n, depth);
}

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,f16c")))

/* A group of outputs has sums in three or four registers, four in each, and `values` of each output. With one channel, this
   is 1. With three it is 3 if neighbors are near each other; if not, it is 4, the last of which is of no use, and each
   register has an output. A group is an offset for each register, from where pixels are loaded; then for each sum a mask
   that takes two values of a channel; and its weights, a pair for each two inputs. */
AVX2 INLINE void make_groups(const struct taps *columns, size_t values)
{
    const size_t count = columns->count, sums = values == 3 ? 12 : 16, channels = values == 1 ? 1 : 3;
    uint32_t *group = columns->groups;
    for (size_t x = 0; x < columns->kept; x += sums / values, group += 4 + sums * (1 + count / 2)) {
        const uint32_t *firsts = columns->firsts + x;
#pragma GCC unroll 16
        for (size_t i = 0; i < sums; i++) {
            size_t one = firsts[i / 4 * 4 / values], other = firsts[(i / 4 * 4 + 3) / values];
            size_t base = one < other ? one : other, value = channels * (firsts[i / values] - base) + i % values;
            group[i / 4] = (uint32_t)(channels * base);
            /* The value, none, that of the next pixel, none. */
            group[4 + i] = 0x80008000 + ((uint32_t)channels << 16) + 0x10001 * (uint32_t)value;
        }
        for (size_t k = 0; k < count / 2; k++)
#pragma GCC unroll 16
            for (size_t i = 0; i < sums; i++)
                memcpy(group + 4 + sums * (1 + k) + i, columns->weights + (x + i / values) * count + 2 * k, 4);
    }
}

/* A group of each of two lines, of twelve or sixteen bytes. Sixteen are written. */
AVX2 INLINE void store_group(uint8_t *one, uint8_t *other, const __m256i *sums, size_t values, __m256i precision)
{
    const __m256i packed = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    __m256i first = _mm256_packs_epi32(_mm256_srav_epi32(sums[0], precision), _mm256_srav_epi32(sums[1], precision));
    __m256i last = _mm256_packs_epi32(_mm256_srav_epi32(sums[2], precision),
                                      _mm256_srav_epi32(sums[values == 3 ? 2 : 3], precision));
    __m256i bytes = _mm256_packus_epi16(first, last);
    if (values == 4)
        bytes = _mm256_shuffle_epi8(bytes, packed);
    _mm_storeu_si128((__m128i *)one, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)other, _mm256_extracti128_si256(bytes, 1));
}

#define FOUR(VALUES) _mm_loadu_si128((const __m128i *)(VALUES))
#define EACH(ONE, OTHER) _mm256_inserti128_si256(_mm256_castsi128_si256(ONE), OTHER, 1)
#define ADD(SUM, PIXELS, WEIGHTS) SUM = _mm256_add_epi32(SUM, _mm256_madd_epi16(PIXELS, WEIGHTS))

AVX2 INLINE void resample_groups(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns,
                                 size_t count, size_t values)
{
    const __m256i half = _mm256_set1_epi32(1 << columns->precision >> 1);
    const __m256i precision = _mm256_set1_epi32(columns->precision);
    const size_t sums = values == 3 ? 12 : 16, channels = values == 1 ? 1 : 3, group_size = sums / values;
    const uint32_t *group = columns->groups;
    /* In registers: what is stored might be anything, to the compiler. */
    const uint8_t *from0 = from[0], *from1 = from[1], *from2 = from[2], *from3 = from[3];
    uint8_t *to0 = to[0], *to1 = to[1], *to2 = to[2], *to3 = to[3];
    for (size_t x = 0; x < columns->kept; x += group_size, group += 4 + sums * (1 + count / 2)) {
        __m256i first[4] = {half, half, half, half}, last[4] = {half, half, half, half};
#pragma GCC unroll 4
        for (size_t i = 0; i < sums / 4; i++) {
            __m256i mask = _mm256_broadcastsi128_si256(FOUR(group + 4 + 4 * i)), one = half, other = half;
#pragma GCC unroll 4
            for (size_t k = 0; k < count / 2; k++) {
                size_t at = group[i] + 2 * channels * k;
                int again = values == 4 && k % 2; /* there are two more pixels in the registers */
                if (!again) {
                    one = EACH(FOUR(from0 + at), FOUR(from1 + at));
                    other = EACH(FOUR(from2 + at), FOUR(from3 + at));
                }
                __m256i taken = again ? _mm256_add_epi8(mask, _mm256_set1_epi8(6)) : mask;
                __m256i weights = _mm256_broadcastsi128_si256(FOUR(group + 4 + sums * (1 + k) + 4 * i));
                ADD(first[i], _mm256_shuffle_epi8(one, taken), weights);
                ADD(last[i], _mm256_shuffle_epi8(other, taken), weights);
            }
        }
        /* What the next call needs, one line after the other. */
        __builtin_prefetch(from[ROWS + x / group_size % ROWS] + group[0]);
        store_group(to0 + channels * x, to1 + channels * x, first, values, precision);
        store_group(to2 + channels * x, to3 + channels * x, last, values, precision);
    }
}

/* How outputs are grouped: not at all, as blends of two inputs, or by `values` of make_groups. */
enum layout { SINGLE = 0, BLENDED = 2 };

/* Eight outputs of one channel: the offset from where pixels are loaded, and three numbers of no use; a mask that takes the
   first of two values for each, and one that takes the second; and shares of the second. */
enum { BLEND = 16 };

AVX2 INLINE void make_blends(const struct taps *columns)
{
    uint32_t *group = columns->groups;
    for (size_t x = 0; x < columns->kept + 8; x += 8, group += BLEND) {
        const uint32_t *firsts = columns->firsts + x, base = firsts[0] < firsts[7] ? firsts[0] : firsts[7];
        uint32_t pairs[8];
        uint16_t values[3][8];
        memcpy(pairs, columns->weights + 2 * x, sizeof pairs);
        for (size_t i = 0; i < 8; i++) {
            uint32_t last = !(pairs[i] & 0xffff); /* a share of 1 is none of the other */
            values[0][i] = (uint16_t)(0x8000 + firsts[i] - base + last);
            values[1][i] = (uint16_t)(0x8001 + firsts[i] - base);
            values[2][i] = (uint16_t)(last ? 0 : pairs[i] >> 16 << (15 - columns->precision));
        }
        *group = base;
        memcpy(group + 4, values, sizeof values);
    }
}

AVX2 INLINE void resample_blends(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns)
{
    const uint8_t *from0 = from[0], *from1 = from[1], *from2 = from[2], *from3 = from[3];
    uint8_t *to0 = to[0], *to1 = to[1], *to2 = to[2], *to3 = to[3];
    const uint32_t *group = columns->groups;
    for (size_t x = 0; x < columns->kept; x += 16) {
        __m256i first[2], last[2];
#pragma GCC unroll 2
        for (size_t i = 0; i < 2; i++, group += BLEND) {
            const __m256i first_of = _mm256_broadcastsi128_si256(FOUR(group + 4));
            const __m256i second_of = _mm256_broadcastsi128_si256(FOUR(group + 8));
            const __m256i shares = _mm256_broadcastsi128_si256(FOUR(group + 12));
            __m256i lines = EACH(FOUR(from0 + *group), FOUR(from1 + *group));
            __m256i others = EACH(FOUR(from2 + *group), FOUR(from3 + *group));
            __m256i one = _mm256_shuffle_epi8(lines, first_of);
            __m256i other = _mm256_shuffle_epi8(others, first_of);
            __m256i step = _mm256_sub_epi16(_mm256_shuffle_epi8(lines, second_of), one);
            __m256i next = _mm256_sub_epi16(_mm256_shuffle_epi8(others, second_of), other);
            first[i] = _mm256_add_epi16(one, _mm256_mulhrs_epi16(step, shares));
            last[i] = _mm256_add_epi16(other, _mm256_mulhrs_epi16(next, shares));
        }
        __builtin_prefetch(from[ROWS + x / 16 % ROWS] + *(group - BLEND));
        __m256i lines = _mm256_packus_epi16(first[0], first[1]), others = _mm256_packus_epi16(last[0], last[1]);
        _mm_storeu_si128((__m128i *)(to0 + x), _mm256_castsi256_si128(lines));
        _mm_storeu_si128((__m128i *)(to1 + x), _mm256_extracti128_si256(lines, 1));
        _mm_storeu_si128((__m128i *)(to2 + x), _mm256_castsi256_si128(others));
        _mm_storeu_si128((__m128i *)(to3 + x), _mm256_extracti128_si256(others, 1));
    }
}

AVX2 INLINE void resample_near(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns, size_t values)
{
    if (columns->count == 2)
        resample_groups(to, from, columns, 2, values);
    else if (columns->count == 4)
        resample_groups(to, from, columns, 4, values);
    else if (columns->count == 6)
        resample_groups(to, from, columns, 6, values);
    else
        resample_groups(to, from, columns, columns->count, values);
}

AVX2 static void resample_lines_avx2(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns,
                                     size_t channels)
{
    if (columns->layout == BLENDED)
        resample_blends(to, from, columns);
    else if (columns->layout == 1)
        resample_near(to, from, columns, 1);
    else if (columns->layout == 3)
        resample_near(to, from, columns, 3);
    else if (columns->layout == 4)
        resample_groups(to, from, columns, columns->count, 4);
    else
        resample_lines(to, from, columns, channels);
}

/* Whether all inputs of a register's outputs, two at a time, are in 16 bytes: `most` lie between the first ones of
   outputs number x and x + step, of a number x in so many. */
AVX2 INLINE int are_near(const struct taps *taps, size_t apart, size_t step, size_t most)
{
    int are = 1;
    for (size_t x = 0; x < taps->kept; x += apart) {
        size_t one = taps->firsts[x], other = taps->firsts[x + step];
        are &= one + most >= other && other + most >= one;
    }
    return are;
}

AVX2 static void find_taps_avx2(struct taps *taps, const struct job *job)
{
    find_any(taps, job);
    taps->layout = SINGLE;
    if (taps->along != ALONG_COLUMNS || taps->same)
        return;
    int are_blends = taps->channels == 1 && are_near(taps, 8, 7, 14);
    for (size_t k = 0; are_blends && k < taps->kept; k++)
        are_blends = blends(taps->weights + 2 * k, taps->count, taps->precision);
    if (are_blends) {
        taps->layout = BLENDED;
        make_blends(taps);
    } else if (taps->channels == 1 && are_near(taps, 4, 3, 14)) {
        taps->layout = 1;
        make_groups(taps, 1);
    } else if (taps->channels == 3 && are_near(taps, 1, 1, 3)) {
        taps->layout = 3;
        make_groups(taps, 3);
    } else if (taps->channels == 3) {
        taps->layout = 4;
        make_groups(taps, 4);
    }
}

/* At most 32 bytes. */
AVX2 INLINE void store_some(uint8_t *to, __m256i bytes, size_t nbytes)
{
    uint8_t rest[sizeof bytes];
    if (nbytes >= sizeof bytes) {
        _mm256_storeu_si256((__m256i *)to, bytes);
    } else {
        _mm256_storeu_si256((__m256i *)rest, bytes);
        memcpy(to, rest, nbytes);
    }
}

/* 32 values of a line, in 16 bits each: the first half of each lane, and the second. */
AVX2 INLINE void blend(__m256i *found, const struct blend *line, size_t at, int is_blend)
{
    const __m256i zero = _mm256_setzero_si256(), share = _mm256_set1_epi16((int16_t)line->share);
    __m256i one = _mm256_loadu_si256((const __m256i *)(line->one + at));
    found[0] = _mm256_unpacklo_epi8(one, zero), found[1] = _mm256_unpackhi_epi8(one, zero);
    if (!is_blend)
        return;
    __m256i other = _mm256_loadu_si256((const __m256i *)(line->other + at));
    __m256i step = _mm256_sub_epi16(_mm256_unpacklo_epi8(other, zero), found[0]);
    __m256i next = _mm256_sub_epi16(_mm256_unpackhi_epi8(other, zero), found[1]);
    found[0] = _mm256_add_epi16(found[0], _mm256_mulhrs_epi16(step, share)); /* which rounds as everything here does */
    found[1] = _mm256_add_epi16(found[1], _mm256_mulhrs_epi16(next, share));
}

AVX2 INLINE void join_some(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count, int bits,
                           size_t nbytes)
{
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << bits >> 1);
    const __m256i precision = _mm256_set1_epi32(bits);
    for (size_t at = 0; at < nbytes; at += sizeof(__m256i)) {
        __m256i sums[4] = {half, half, half, half};
#pragma GCC unroll 4
        for (size_t k = 0; k < count; k += 2) {
            int32_t pair;
            memcpy(&pair, weights + k, sizeof pair);
            __m256i weight = _mm256_set1_epi32(pair);
            __m256i one = _mm256_loadu_si256((const __m256i *)(lines[k] + at));
            __m256i other = _mm256_loadu_si256((const __m256i *)(lines[k + 1] + at));
            __m256i low = _mm256_unpacklo_epi8(one, other), high = _mm256_unpackhi_epi8(one, other);
            ADD(sums[0], _mm256_unpacklo_epi8(low, zero), weight);
            ADD(sums[1], _mm256_unpackhi_epi8(low, zero), weight);
            ADD(sums[2], _mm256_unpacklo_epi8(high, zero), weight);
            ADD(sums[3], _mm256_unpackhi_epi8(high, zero), weight);
        }
        for (int i = 0; i < 4; i++)
            sums[i] = _mm256_srav_epi32(sums[i], precision);
        __m256i found = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        store_some(to + at, found, nbytes - at);
    }
}

AVX2 static void join_lines_avx2(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count,
                                 int precision, size_t nbytes)
{
    if (blends(weights, count, precision)) {
        struct blend both = blend_of(lines, weights, precision);
        for (size_t at = 0; at < nbytes; at += sizeof(__m256i)) {
            __m256i found[2];
            blend(found, &both, at, 1);
            store_some(to + at, _mm256_packus_epi16(found[0], found[1]), nbytes - at);
        }
    } else if (count == 4)
        join_some(to, lines, weights, 4, precision, nbytes);
    else
        join_some(to, lines, weights, count, precision, nbytes);
}

AVX2 INLINE __m256i add_shares(__m256i y, __m256i color, int share)
{
    return _mm256_add_epi16(_mm256_add_epi16(y, color), _mm256_mulhrs_epi16(color, _mm256_set1_epi16((int16_t)share)));
}

/* y - (11277 cb + 23401 cr) / 2^15, of half of 8 numbers of each lane. */
AVX2 INLINE __m256i weigh_both(__m256i both)
{
    const __m256i weights = _mm256_set1_epi32((int)((uint32_t)-23401 << 16 | (-11277 & 0xffff)));
    return _mm256_srai_epi32(_mm256_add_epi32(_mm256_madd_epi16(both, weights), _mm256_set1_epi32(1 << 14)), 15);
}

AVX2 INLINE void to_rgb_from(uint8_t *to, const struct blend *lines, size_t count, int is_blend)
{
    const __m256i middle = _mm256_set1_epi16(128);
    const struct blend given[] = {lines[0], lines[1], lines[2]}; /* in registers */
    /* Of 16 bytes of each lane, in one order for each color: every third is in its place, and the others are in theirs in
       the next 32 bytes of the result. */
    const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 11, 6, 1, 12, 7, 2, 13, 8, 3, 14, 9, 4, 15, 10, 5));
    const __m256i second = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0));
    const __m256i third = _mm256_bslli_epi128(second, 1);
    for (size_t at = 0; at < count; at += sizeof(__m256i)) {
        __m256i found[3][2], bytes[3];
        for (int i = 0; i < 3; i++)
            blend(found[i], &given[i], at, i || is_blend);
        for (int i = 0; i < 2; i++) {
            __m256i y = found[0][i], cb = _mm256_sub_epi16(found[1][i], middle), cr = _mm256_sub_epi16(found[2][i], middle);
            __m256i low = weigh_both(_mm256_unpacklo_epi16(cb, cr)), high = weigh_both(_mm256_unpackhi_epi16(cb, cr));
            found[0][i] = add_shares(y, cr, 45941 - 32768);
            found[1][i] = _mm256_add_epi16(y, _mm256_packs_epi32(low, high));
            found[2][i] = add_shares(y, cb, 58065 - 32768);
        }
        for (int i = 0; i < 3; i++)
            bytes[i] = _mm256_packus_epi16(found[i][0], found[i][1]);
        __m256i red = _mm256_shuffle_epi8(bytes[0], order);
        __m256i green = _mm256_shuffle_epi8(bytes[1], _mm256_alignr_epi8(order, order, 15));
        __m256i blue = _mm256_shuffle_epi8(bytes[2], _mm256_alignr_epi8(order, order, 14));
        __m256i one = _mm256_blendv_epi8(_mm256_blendv_epi8(red, green, second), blue, third);
        __m256i two = _mm256_blendv_epi8(_mm256_blendv_epi8(green, blue, second), red, third);
        __m256i three = _mm256_blendv_epi8(_mm256_blendv_epi8(blue, red, second), green, third);
        uint8_t rest[3 * sizeof one], *place = count - at < sizeof one ? rest : to + 3 * at;
        _mm256_storeu_si256((__m256i *)place, _mm256_permute2x128_si256(one, two, 0x20));
        _mm256_storeu_si256((__m256i *)place + 1, _mm256_permute2x128_si256(three, one, 0x30));
        _mm256_storeu_si256((__m256i *)place + 2, _mm256_permute2x128_si256(two, three, 0x31));
        if (place == rest)
            memcpy(to + 3 * at, rest, 3 * (count - at));
    }
}

AVX2 static void to_rgb_avx2(uint8_t *to, const struct blend *lines, size_t count)
{
    if (lines[0].share)
        to_rgb_from(to, lines, count, 1);
    else
        to_rgb_from(to, lines, count, 0);
}

AVX2 static void to_yuv_avx2(uint8_t *const *to, const uint8_t *from, size_t width)
{
    yuv_from(to, from, width);
}

AVX2 INLINE __m256 normalize_avx2(const uint8_t *from, const float *factors, const float *offsets)
{
    __m256 pixels = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)));
    return _mm256_add_ps(_mm256_mul_ps(pixels, _mm256_loadu_ps(factors)), _mm256_loadu_ps(offsets));
}

AVX2 INLINE __m256i round_bfloat16(__m256 values, int have_ties)
{
    __m256i bits = _mm256_castps_si256(values), half = _mm256_set1_epi32(0x8000);
    if (have_ties) {
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    }
    return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
}

/* Whole cache lines are written past the caches: an output is larger than these, and is read much later. A line that is
   written in both ways takes longer than in either. */
AVX2 INLINE void cast_line(void *to, const uint8_t *from, const struct affine *affine, size_t n, enum depth depth,
                           int has_ties)
{
    const float *factors = affine->factors, *offsets = affine->offsets;
    size_t line = CACHE_LINE / itemsize_of(depth), i = -(uintptr_t)to % CACHE_LINE / itemsize_of(depth), end;
    uint16_t *halves = to;
    i = i < n ? i : n;
    end = i + (n - i) / line * line;
    cast_from(0, to, from, affine, i, depth);
    for (; i < end; i += 16) {
        __m256 first = normalize_avx2(from + i, factors + i, offsets + i);
        __m256 last = normalize_avx2(from + i + 8, factors + i + 8, offsets + i + 8);
        if (depth == FLOAT32) {
            _mm256_stream_ps((float *)to + i, first);
            _mm256_stream_ps((float *)to + i + 8, last);
        } else if (depth == BFLOAT16) {
            __m256i both = _mm256_packus_epi32(round_bfloat16(first, has_ties), round_bfloat16(last, has_ties));
            _mm256_stream_si256((__m256i *)(halves + i), _mm256_permute4x64_epi64(both, 0xd8));
        } else {
            __m256i low = _mm256_castsi128_si256(_mm256_cvtps_ph(first, _MM_FROUND_TO_NEAREST_INT));
            __m256i both = _mm256_inserti128_si256(low, _mm256_cvtps_ph(last, _MM_FROUND_TO_NEAREST_INT), 1);
            _mm256_stream_si256((__m256i *)(halves + i), both);
        }
    }
    cast_from(i, to, from, affine, n, depth);
}

AVX2 static void cast_avx2(void *to, const uint8_t *from, const struct affine *affine, size_t n, enum depth depth)
{
    if (depth == FLOAT32)
        cast_line(to, from, affine, n, FLOAT32, 0);
    else if (depth == FLOAT16)
        cast_line(to, from, affine, n, FLOAT16, 0);
    else if (affine->has_ties)
        cast_line(to, from, affine, n, BFLOAT16, 1);
    else
        cast_line(to, from, affine, n, BFLOAT16, 0);
}

static int has_avx2(void)
{
    unsigned eax, ebx, ecx = 0, edx; /* clang does not know the name of F16C */
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

#endif

#if defined(__aarch64__) && defined(__ARM_NEON)
#include <arm_neon.h>

static void resample_lines_neon(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns,
                                size_t channels)
{
    if (channels != 3) {
        resample_lines(to, from, columns, channels);
        return;
    }
    const int32x4_t half = vdupq_n_s32(1 << columns->precision >> 1), shift = vdupq_n_s32(-columns->precision);
    for (size_t row = 0; row < ROWS; row++)
        for (size_t x = 0; x < columns->kept; x++) {
            const uint8_t *pixels = from[row] + 3 * columns->firsts[x];
            const int16_t *weights = columns->weights + x * columns->count;
            int32x4_t sum = half;
            for (size_t k = 0; k < columns->count; k++)
                sum = vmlal_n_s16(sum, vreinterpret_s16_u16(vget_low_u16(vmovl_u8(vld1_u8(pixels + 3 * k)))), weights[k]);
            int16x4_t levels = vqmovn_s32(vshlq_s32(sum, shift));
            uint32_t bytes = vget_lane_u32(vreinterpret_u32_u8(vqmovun_s16(vcombine_s16(levels, levels))), 0);
            memcpy(to[row] + 3 * x, &bytes, sizeof bytes);
        }
}

static void join_lines_neon(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count, int precision,
                            size_t nbytes)
{
    const int32x4_t half = vdupq_n_s32(1 << precision >> 1), shift = vdupq_n_s32(-precision);
    for (size_t at = 0; at < nbytes; at += 8) {
        int32x4_t low = half, high = half;
        for (size_t k = 0; k < count; k++) {
            int16x8_t pixels = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(lines[k] + at)));
            low = vmlal_n_s16(low, vget_low_s16(pixels), weights[k]);
            high = vmlal_n_s16(high, vget_high_s16(pixels), weights[k]);
        }
        uint8x8_t found = vqmovun_s16(vcombine_s16(vqmovn_s32(vshlq_s32(low, shift)), vqmovn_s32(vshlq_s32(high, shift))));
        if (at + 8 <= nbytes) {
            vst1_u8(to + at, found);
        } else {
            uint8_t rest[8];
            vst1_u8(rest, found);
            memcpy(to + at, rest, nbytes - at);
        }
    }
}

#endif

/* The first is the best. */
static struct form forms[3];
static size_t num_forms;

static void find_forms(void)
{
    num_forms = 0;
#ifdef AVX2
    if (has_avx2())
        forms[num_forms++] = (struct form){"avx2", find_taps_avx2, resample_lines_avx2, join_lines_avx2, to_rgb_avx2, to_yuv_avx2,
                                           cast_avx2};
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
    forms[num_forms++] = (struct form){"neon", find_taps, resample_lines_neon, join_lines_neon, to_rgb, to_yuv, cast};
#endif
    forms[num_forms++] = (struct form){"portable", find_taps, resample_lines, join_lines, to_rgb, to_yuv, cast};
}

static const struct form wide = {"wide", find_taps, resample_wide, join_wide, to_rgb, to_yuv, cast};

/* The pixels of a plane in its window: lines of `line_nbytes` bytes, `stride` bytes apart, before `end` of what may be
   read. */
struct shown {
    const uint8_t *first, *end;
    size_t line_nbytes, stride;
};

/* There is room for `places` resampled lines, a power of 2: row number n has place n modulo `places`, and `found` has where
   its line is. Those before `made` that are wanted are there. `bytes` is an output line. */
struct plane {
    struct taps *rows, *columns; /* planes of one size share them */
    struct shown shown;
    size_t channels, made, places, line_nbytes;
    uint8_t *lines, *bytes;
    const uint8_t **found;
};

/* Memory of one thread. */
struct room {
    struct taps taps[2][NUM_AXES]; /* of whole planes, and of halved ones */
    struct plane planes[MOST_PLANES];
    size_t num_planes;
    uint8_t *bytes, *ends[ROWS]; /* the last rows of the last window, behind which a load would leave its memory */
    const uint8_t **sources;
    struct affine affine;
};

INLINE void mirror_line(uint8_t *to, const uint8_t *from, size_t count, size_t channels)
{
    for (size_t x = 0; x < count; x++, to += channels, from -= channels)
        memcpy(to, from, channels);
}

static void mirror_bytes(uint8_t *to, const uint8_t *from, size_t count)
{
    uint64_t some;
    for (; count >= sizeof some; count -= sizeof some, to += sizeof some, from -= sizeof some) {
        memcpy(&some, from - sizeof some + 1, sizeof some);
        some = __builtin_bswap64(some);
        memcpy(to, &some, sizeof some);
    }
    mirror_line(to, from, count, 1);
}

static void copy_line(uint8_t *to, const uint8_t *from, const struct taps *columns, size_t channels)
{
    if (columns->kept == 1 || columns->firsts[0] < columns->firsts[1])
        memcpy(to, from, columns->kept * channels);
    else if (channels == 3) /* a copy of so many bytes is no call */
        mirror_line(to, from, columns->kept, 3);
    else if (channels == 1)
        mirror_bytes(to, from, columns->kept);
    else
        mirror_line(to, from, columns->kept, channels);
}

/* Lines number `row` of a plane and those that follow, ROWS of them. Those of number `end` and beyond are of no use. */
static void make_lines(const struct plane *plane, const struct form *form, struct room *room, size_t row, size_t end)
{
    const struct taps *columns = plane->columns;
    const struct shown *shown = &plane->shown;
    size_t channels = plane->channels, reach = columns->count * channels + SLACK, nbytes = columns->kept * channels;
    const uint8_t *from[2 * ROWS];
    uint8_t *to[ROWS];
    for (size_t i = 0; i < 2 * ROWS; i++)
        from[i] = shown->first + (row + i < end ? row + i : end - 1) * shown->stride;
    for (size_t i = 0; i < ROWS; i++) {
        size_t place = (row + i) & (plane->places - 1), left = (size_t)(shown->end - from[i]);
        plane->found[place] = to[i] = plane->lines + place * plane->line_nbytes;
        if (columns->same) {
            const uint8_t *first = from[i] + columns->firsts[0] * channels;
            int is_mirrored = columns->kept > 1 && columns->firsts[0] > columns->firsts[1];
            if (!is_mirrored && (size_t)(shown->end - first) >= nbytes + SLACK)
                plane->found[place] = first;
            else
                copy_line(to[i], first, columns, channels);
        } else if (left < shown->line_nbytes + reach) {
            memcpy(room->ends[i], from[i], shown->line_nbytes);
            from[i] = room->ends[i];
        }
    }
    if (!columns->same)
        form->resample_lines(to, from, columns, channels);
}

/* Output line `row` of a plane, joined in `to`; or, as nothing has to be joined then, the line that it equals; or, if
   `may_blend`, two lines. */
INLINE struct blend make_line(struct plane *plane, const struct form *form, struct room *room, size_t row, uint8_t *to,
                              int may_blend)
{
    const struct taps *rows = plane->rows;
    const size_t count = rows->count, first = rows->firsts[row], last = plane->places - 1;
    const size_t end = first + count < rows->end ? first + count : rows->end;
    const int16_t *weights = rows->weights + row * count * (size_t)rows->need.places;
    const uint8_t **sources = room->sources, **found = plane->found;
    /* Without antialias, lines between those that are wanted are not. */
    plane->made = plane->made < first ? first : plane->made;
    for (; plane->made < end; plane->made += ROWS)
        make_lines(plane, form, room, plane->made, rows->end);
    if (rows->same)
        return (struct blend){found[first & last], found[first & last], 0};
    for (size_t k = 0; k < count; k++)
        sources[k] = found[(first + k < end ? first + k : end - 1) & last];
    if (may_blend && rows->need.places == 1 && blends(weights, count, rows->precision))
        return blend_of(sources, weights, rows->precision);
    form->join_lines(to, sources, weights, count, rows->precision, plane->columns->kept * plane->channels);
    return (struct blend){to, to, 0};
}

static void find(struct taps *taps, const struct job *job, const struct form *form, size_t image)
{
    const int64_t *window = job->windows + NUM_SIDES * image;
    uint8_t flags = job->flags[image];
    struct need need = {.axis = job->axes[NUM_AXES * image + (size_t)taps->along], .origin = window[TOP + taps->along]};
    need.flip = taps->along == ALONG_COLUMNS && flags & MIRRORED;
    need.reach = filter_radius(flags);
    need.places = flags & WIDE ? 2 : 1;
    if (taps->halved) {
        struct axis *axis = &need.axis;
        axis->start /= 2;
        axis->scale /= 2;
        /* What the pixels from low to high are made of, when a whole picture is enlarged. */
        axis->low = fmax(0, floor((axis->low - 1) / 2));
        axis->high = fmin((double)(window[HEIGHT + taps->along] / 2), floor(axis->high / 2) + 1);
        if (axis->scale < 1) /* bilinear, as decoders enlarge */
            need.reach = 1;
    }
    if (memcmp(&need, &taps->need, sizeof need)) {
        taps->need = need;
        form->find_taps(taps, job);
    }
}

/* Where the planes of an image lie. */
static void show(struct room *room, const struct job *job, size_t image)
{
    const uint8_t *first = job->pixels + job->places[image], *end = job->pixels + job->nbytes;
    for (size_t i = 0; i < room->num_planes; i++) {
        size_t height = (size_t)job->windows[NUM_SIDES * image + HEIGHT] >> (i > 0);
        size_t line = ((size_t)job->windows[NUM_SIDES * image + WIDTH] >> (i > 0)) * room->planes[i].channels;
        room->planes[i].shown = (struct shown){first, end, line, job->stride ? job->stride : line};
        first += (height - 1) * room->planes[i].shown.stride + line;
    }
    for (size_t i = 0; i < room->num_planes && (job->stride || job->halved); i++)
        room->planes[i].shown.end = first; /* behind a window of a mapped image may be a page that nobody has */
}

static void resample_one(const struct job *job, const struct form *form, struct room *room, size_t number)
{
    const struct taps *rows = &room->taps[0][ALONG_ROWS], *columns = &room->taps[0][ALONG_COLUMNS];
    size_t n = (size_t)job->size[ALONG_COLUMNS] * job->channels;
    size_t at = (job->lines ? (size_t)job->lines[number] : number) * (size_t)job->size[ALONG_ROWS] * n;
    form = job->flags[number] & WIDE ? &wide : form;
    show(room, job, number);
    for (size_t i = 0; i < room->num_planes; i++) {
        struct plane *plane = &room->planes[i];
        find(plane->rows, job, form, number);
        find(plane->columns, job, form, number);
        plane->made = plane->rows->firsts[0];
    }
    size_t before = columns->before * job->channels, nbytes = columns->kept * job->channels;
    for (size_t y = 0; y < (size_t)job->size[ALONG_ROWS]; y++, at += n) {
        size_t row = y - rows->before;
        /* Bytes go to their place at once. */
        uint8_t *to = job->depth == UINT8 ? (uint8_t *)job->out + at : room->bytes;
        if (y < rows->before || row >= rows->kept) {
            memset(to, 0, n);
        } else {
            struct blend made[MOST_PLANES];
            for (size_t i = 0; i < room->num_planes; i++)
                made[i] = job->halved ? make_line(&room->planes[i], form, room, row, room->planes[i].bytes, 1)
                                      : make_line(&room->planes[i], form, room, row, to + before, 0);
            if (job->halved)
                form->to_rgb(to + before, made, columns->kept);
            else if (made[0].one != to + before)
                memcpy(to + before, made[0].one, nbytes);
            if (nbytes < n) {
                memset(to, 0, before);
                memset(to + before + nbytes, 0, n - before - nbytes);
            }
        }
        if (job->depth != UINT8)
            form->cast((uint8_t *)job->out + at * itemsize_of(job->depth), to, &room->affine, n, job->depth);
    }
}

static int make_taps(struct taps *taps, const struct job *job, int along, int halved)
{
    double largest = 1;
    for (size_t i = 0; i < job->count; i++)
        largest = fmax(largest, job->axes[NUM_AXES * i + (size_t)along].scale / (1 + halved));
    size_t kept = (size_t)job->size[along], limit = (size_t)job->most[along] >> halved;
    size_t most = 2 * (size_t)ceil(radius_of(job, largest)) + 2;
    taps->most = ((most < limit ? most : limit) + 1) / 2 * 2;
    taps->firsts = malloc((kept + BLOCK) * sizeof(uint32_t));
    taps->weights = malloc((kept + BLOCK) * taps->most * sizeof(int32_t));
    taps->exact = malloc((kept + 2 * BLOCK) * taps->most * sizeof(double));
    taps->along = along, taps->halved = halved, taps->channels = job->halved ? 1 : job->channels;
    taps->groups = malloc((kept + 4) / 4 * (20 + 8 * taps->most) * sizeof(uint32_t));
    return taps->firsts && taps->weights && taps->exact && taps->groups;
}

static int make_plane(struct plane *plane, struct taps *taps, const struct job *job)
{
    plane->rows = &taps[ALONG_ROWS], plane->columns = &taps[ALONG_COLUMNS];
    plane->channels = taps->channels;
    for (plane->places = 1; plane->places < taps->most + ROWS;)
        plane->places *= 2;
    plane->line_nbytes = (size_t)job->size[ALONG_COLUMNS] * taps->channels + SLACK;
    plane->lines = calloc(plane->places, plane->line_nbytes); /* what lies between lines is read, too */
    plane->bytes = calloc(1, plane->line_nbytes);
    plane->found = malloc(plane->places * sizeof(*plane->found));
    return plane->lines && plane->bytes && plane->found;
}

static void free_room(struct room *room)
{
    for (int i = 0; i < 2 * NUM_AXES; i++) {
        struct taps *taps = &room->taps[i / NUM_AXES][i % NUM_AXES];
        free(taps->firsts);
        free(taps->weights);
        free(taps->exact);
        free(taps->groups);
    }
    for (int i = 0; i < MOST_PLANES; i++) {
        free(room->planes[i].lines);
        free(room->planes[i].bytes);
        free(room->planes[i].found);
    }
    for (int i = 0; i < ROWS; i++)
        free(room->ends[i]);
    free(room->sources);
    free(room->bytes);
    free(room->affine.factors);
    free(room->affine.offsets);
}

static void find_affine(struct affine *affine, const struct job *job, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        affine->factors[i] = job->affine[i % job->channels];
        affine->offsets[i] = job->affine[job->channels + i % job->channels];
    }
    for (size_t i = 0; i < job->channels; i++)
        for (int level = 0; level < 256; level++)
            affine->has_ties |= (bits_of((float)level * affine->factors[i] + affine->offsets[i]) & 0xffff) == 0x8000;
}

/* How many images were made: all, unless a page of the next one's window failed. -1 if there is no memory. */
static Py_ssize_t run(const struct job *job, const struct form *form)
{
    struct room room;
    memset(&room, 0, sizeof room);
    size_t n = (size_t)job->size[ALONG_COLUMNS] * job->channels, most = (size_t)job->most[ALONG_COLUMNS];
    int done = 1;
    for (int i = 0; done && i < (job->halved ? 4 : 2); i++)
        done = make_taps(&room.taps[i / NUM_AXES][i % NUM_AXES], job, i % NUM_AXES, i / NUM_AXES);
    room.num_planes = job->halved ? 3 : 1;
    for (size_t i = 0; done && i < room.num_planes; i++)
        done = make_plane(&room.planes[i], room.taps[i > 0], job);
    if (done) {
        room.sources = malloc(room.taps[0][ALONG_ROWS].most * sizeof(*room.sources));
        room.bytes = malloc(n + SLACK);
        room.affine.factors = malloc(n * sizeof(float));
        room.affine.offsets = malloc(n * sizeof(float));
        done = room.sources && room.bytes && room.affine.factors && room.affine.offsets;
    }
    for (int i = 0; done && i < ROWS; i++)
        done = !!(room.ends[i] = calloc((most + room.taps[0][ALONG_COLUMNS].most) * job->channels + SLACK, 1));
    if (done && job->affine)
        find_affine(&room.affine, job, n);
    sigjmp_buf here;
    volatile size_t made = 0;
    if (done && !sigsetjmp(here, 0)) {
        guard->enter(&here);
        for (; made < job->count; made++)
            resample_one(job, form, &room, made);
    }
    guard->leave();
#ifdef AVX2
    _mm_sfence(); /* what went past the caches is seen before whatever says that it is there */
#endif
    free_room(&room);
    return done ? (Py_ssize_t)made : -1;
}

/* Whether the outputs of an axis lie in what may be seen, and that in the window. Comparisons with what is no number are
   false. */
static int is_inside(const struct axis *axis, int64_t start, int64_t side, int64_t resized)
{
    double slack = 1e-6, end = axis->start + axis->scale * (double)resized;
    return axis->low >= (double)start && axis->high >= axis->low + 1 && axis->high <= (double)(start + side) &&
           axis->low == floor(axis->low) && axis->high == floor(axis->high) && axis->scale > 0 &&
           axis->start >= axis->low - slack && end <= axis->high + slack;
}

/* The number of the first image whose box is not inside its window; or how many there are. */
static size_t find_outside(const struct job *job)
{
    for (size_t i = 0; i < job->count; i++) {
        const int64_t *window = job->windows + NUM_SIDES * i;
        const struct axis *axes = job->axes + NUM_AXES * i;
        if (!is_inside(axes, window[TOP], window[HEIGHT], job->resized[ALONG_ROWS]) ||
            !is_inside(axes + 1, window[LEFT], window[WIDTH], job->resized[ALONG_COLUMNS]))
            return i;
    }
    return job->count;
}

/* Whether the windows have places and sizes that make sense, and lie in the bytes that there are. Sets the most. */
static int fit_together(struct job *job)
{
    for (size_t i = 0; i < job->count; i++) {
        const int64_t *window = job->windows + NUM_SIDES * i;
        for (int side = 0; side < NUM_SIDES; side++)
            if (window[side] < (side == TOP || side == LEFT ? 0 : 1) || window[side] > MOST_SIDE)
                return 0;
        size_t line = (size_t)window[WIDTH] * (job->halved ? 1 : job->channels), stride = job->stride ? job->stride : line;
        if (job->places[i] < 0 || (size_t)job->places[i] > job->nbytes)
            return 0;
        size_t left = job->nbytes - (size_t)job->places[i], height = (size_t)window[HEIGHT];
        if (job->halved && (window[TOP] || window[LEFT] || height % 2 || line % 2 || job->stride || job->channels != 3))
            return 0;
        height += job->halved ? height / 2 : 0;
        if (line > left || line > stride || height - 1 > (left - line) / stride)
            return 0;
        for (int axis = 0; axis < NUM_AXES; axis++)
            if (window[HEIGHT + axis] > job->most[axis])
                job->most[axis] = window[HEIGHT + axis];
    }
    return 1;
}

static int are_sizes(const struct job *job, Py_ssize_t nbytes)
{
    if (job->channels < 1 || job->channels > MOST_CHANNELS)
        return 0;
    for (int axis = 0; axis < NUM_AXES; axis++)
        if (job->size[axis] < 1 || job->size[axis] > MOST_SIDE || job->resized[axis] < 1 ||
            job->resized[axis] > MOST_SIDE || job->first[axis] <= -job->size[axis] || job->first[axis] >= job->resized[axis])
            return 0;
    Py_ssize_t line = (Py_ssize_t)job->channels * job->size[ALONG_COLUMNS] * (Py_ssize_t)itemsize_of(job->depth);
    Py_ssize_t count = job->lines ? nbytes / line / job->size[ALONG_ROWS] : (Py_ssize_t)job->count;
    for (size_t i = 0; job->lines && i < job->count; i++)
        if (job->lines[i] < 0 || job->lines[i] >= count)
            return 0;
    return nbytes / line / job->size[ALONG_ROWS] == count && nbytes == count * line * job->size[ALONG_ROWS];
}

static int are_finite(const float *values, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(values[i]))
            return 0;
    return 1;
}

static PyObject *resample(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer pixels, places, windows, axes, flags, lines, out, affine;
    struct job job;
    memset(&job, 0, sizeof job);
    Py_ssize_t channels, form, stride;
    int depth;
    long long resized[NUM_AXES], first[NUM_AXES], size[NUM_AXES];
    if (!PyArg_ParseTuple(args, "y*y*npy*y*y*z*w*y*n(LL)(LL)(LL)pin:resample", &pixels, &places, &stride, &job.halved, &windows, &axes,
                          &flags, &lines, &out, &affine, &channels, resized, resized + 1, first, first + 1, size, size + 1, &job.antialias,
                          &depth, &form))
        return NULL;
    PyObject *result = NULL;
    size_t outside;
    Py_ssize_t count = flags.len;
    job.pixels = pixels.buf, job.windows = windows.buf, job.axes = axes.buf, job.flags = flags.buf, job.out = out.buf;
    job.lines = lines.buf, job.places = places.buf, job.nbytes = (size_t)pixels.len;
    job.stride = stride > 0 ? (size_t)stride : 0;
    job.radius = 1;
    for (Py_ssize_t i = 0; i < count; i++)
        job.radius = filter_radius(job.flags[i]) > job.radius ? filter_radius(job.flags[i]) : job.radius;
    job.count = (size_t)count, job.channels = channels > 0 ? (size_t)channels : 0;
    job.affine = affine.len ? affine.buf : NULL;
    job.depth = (enum depth)depth;
    for (int axis = 0; axis < NUM_AXES; axis++) {
        job.resized[axis] = resized[axis], job.first[axis] = first[axis], job.size[axis] = size[axis];
        job.most[axis] = 1;
    }
    if (depth < UINT8 || depth > FLOAT16 || (lines.buf && lines.len != 8 * count) || places.len != 8 * count || stride < 0 || form < 0 || form >= (Py_ssize_t)num_forms || !are_sizes(&job, out.len) ||
        (uintptr_t)out.buf % itemsize_of(job.depth) ||
        axes.len != count * NUM_AXES * (Py_ssize_t)sizeof(struct axis) || windows.len != 8 * NUM_SIDES * count ||
        affine.len != (depth == UINT8 ? 0 : 2 * channels * (Py_ssize_t)sizeof(float)) ||
        !fit_together(&job)) {
        PyErr_SetString(PyExc_ValueError, "the sizes of pixels, windows, axes, flags, lines, out and affine do not fit together");
    } else if (job.affine && !are_finite(job.affine, 2 * job.channels)) {
        PyErr_SetString(PyExc_ValueError, "expected finite factors and offsets in affine");
    } else if ((outside = find_outside(&job)) < job.count) {
        PyErr_Format(PyExc_IndexError, "the box of image %zu is not inside its window", outside);
    } else {
        Py_ssize_t made;
        Py_BEGIN_ALLOW_THREADS
        made = run(&job, forms + form);
        Py_END_ALLOW_THREADS
        result = made < 0 ? PyErr_NoMemory() : PyLong_FromSsize_t(made);
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&places);
    PyBuffer_Release(&windows);
    PyBuffer_Release(&axes);
    PyBuffer_Release(&flags);
    PyBuffer_Release(&lines);
    PyBuffer_Release(&out);
    PyBuffer_Release(&affine);
    return result;
}

static PyObject *to_yuv420(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer images, out;
    Py_ssize_t height, width, form;
    if (!PyArg_ParseTuple(args, "y*w*nnn:to_yuv420", &images, &out, &height, &width, &form))
        return NULL;
    PyObject *result = NULL;
    const uint8_t *from = images.buf, *end = from + images.len;
    uint8_t *to = out.buf;
    int are_sides = height > 0 && width > 0 && height <= MOST_SIDE && width <= MOST_SIDE && height % 2 + width % 2 == 0;
    if (!are_sides || images.len % (3 * height * width) || out.len != images.len / 2 || form < 0 ||
        form >= (Py_ssize_t)num_forms || (to < end && from < to + out.len)) {
        PyErr_SetString(PyExc_ValueError, "expected even sides, and images and out of these sides that share no memory");
    } else {
        Py_BEGIN_ALLOW_THREADS
        for (; from < end; to += height * width / 2) {
            uint8_t *cb = to + height * width, *cr = cb + height * width / 4;
            for (Py_ssize_t y = 0; y < height; y += 2, from += 6 * width, to += 2 * width, cb += width / 2, cr += width / 2)
                forms[form].to_yuv((uint8_t *[]){to, to + width, cb, cr}, from, (size_t)width);
        }
        Py_END_ALLOW_THREADS
        result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&images);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"to_yuv420", to_yuv420, METH_VARARGS,
     "to_yuv420(images, out, height, width, form)\n\n"
     "out = images of RGB, with even sides, as yuv420: lines of Y, then of Cb, then of Cr. `form` is an index of FORMS."},
    {"resample", resample, METH_VARARGS,
     "resample(pixels, places, stride, halved, windows, axes, flags, lines, out, affine, channels, resized, first, size, "
     "antialias, depth, form)\n\n"
     "out = for each image outputs number `first` to `first + size` of the `resized` ones, along rows and columns, mirrored\n"
     "where its flag has the bit 1, by a cubic filter where it has the bit 2, by Lanczos' with the bit 4, by a box with 8;\n"
     "with weights of 32 bits where it has the bit 16.\n"
     "`pixels` has a window of each, whose first byte is in `places`, with lines `stride` bytes apart, or, with 0, packed.\n"
     "With `halved`, windows are whole images of yuv420, packed, and results are RGB.\n"
     "Along an axis, output i is centered at start + scale * (i + 1/2),\n"
     "and the filter sees pixels from low to before high. depth is 0 for bytes and an empty affine; or 1, 2, 3 for float32,\n"
     "bfloat16 and float16, and affine has a factor for each channel and then what is added to each. `form` is an index of\n"
     "FORMS. Returns how many images were made: all, unless storage fails at the next."},
    {NULL, NULL, 0, NULL}};

static int add_constants(PyObject *module)
{
    PyObject *owner = PyImport_ImportModule("shardio.kernels._rowcopy");
    guard = owner ? PyCapsule_Import(GUARD_NAME, 0) : NULL;
    Py_XDECREF(owner); /* sys.modules keeps it */
    if (!guard)
        return -1;
    find_forms();
    PyObject *names = PyTuple_New((Py_ssize_t)num_forms);
    for (size_t i = 0; names && i < num_forms; i++) {
        PyObject *name = PyUnicode_FromString(forms[i].name);
        if (!name)
            Py_CLEAR(names);
        else
            PyTuple_SET_ITEM(names, (Py_ssize_t)i, name);
    }
    int failed = !names || PyModule_AddObjectRef(module, "FORMS", names);
    Py_XDECREF(names);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_constants},
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_resample", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__resample(void)
{
    return PyModuleDef_Init(&definition);
}
