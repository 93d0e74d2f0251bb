/* Resamples boxes of images to one size, with the same bytes as the operations of torch in tests/support/resampling_by_torch.py
   and tests/conversion/test_fit.py. Lines come first: each output is a sum of pixels times weights of 16 bits, or with WIDE of
   32, as Pillow has them, rounded to a byte. Then the same along the columns. A line is resampled when the next line of the output needs it, and an output line
   is normalized and cast when it is written, so no image in between is ever in memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"

#define INLINE static inline __attribute__((always_inline))

/* Lines that are resampled at once, and outputs of each. */
#define ROWS 4
#define GROUP 4
/* Outputs whose weights are found at once. */
#define BLOCK 32
/* Of a weight of 32 bits, those behind the point: Pillow's PRECISION_BITS. */
#define WIDE_BITS 22
/* What a load may reach beyond the bytes that are wanted, and a store beyond a line. */
#define SLACK 32
#define CACHE_LINE 64
#define MOST_SIDE ((int64_t)1 << 20)
#define MOST_CHANNELS 64

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
    /* Of all outputs along an axis, numbers `first` to `first + size` are written. Those that do not exist are black. */
    int64_t resized[NUM_AXES], first[NUM_AXES], size[NUM_AXES];
    int64_t most[NUM_AXES]; /* the largest height and width of a window */
    int radius, antialias; /* the widest radius of a filter */
    enum depth depth;
};

enum { MIRRORED = 1, CUBIC = 2, LANCZOS = 4, BOX = 8, WIDE = 16 };

static const struct guard *guard;

/* What the outputs along one axis are made of. Output number k is a sum of `count` inputs, an even number, from input
   number firsts[k] of the window on. Inputs that it does not need have a weight of 0, and may lie beyond the last. There is
   room for `most` weights of each output. */
struct taps {
    size_t before, kept; /* how many outputs do not exist, and then how many do */
    size_t count, most, end /* behind the last input of all */, *firsts;
    int precision; /* weights are in units of 2^-precision */
    int same;      /* outputs are inputs */
    size_t places; /* of 16 bits, that a weight takes */
    int16_t *weights;
    double *exact;    /* weights before they are rounded, of BLOCK outputs after those of BLOCK others */
    uint32_t *groups; /* all of this as the form "avx2" has it, */
    int are_near;     /* which depends on whether neighbors begin near each other */
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
            taps->firsts[k + j] = (size_t)((int64_t)from[j] - origin);
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

INLINE void find_any(struct taps *taps, const struct job *job, size_t image, int number, int flip)
{
    const struct axis *axis = job->axes + NUM_AXES * image + number;
    int64_t origin = job->windows[NUM_SIDES * image + (size_t)(TOP + number)];
    int64_t resized = job->resized[number], first = job->first[number] > 0 ? job->first[number] : 0;
    int64_t end = job->first[number] + job->size[number];
    taps->before = (size_t)(first - job->first[number]);
    taps->kept = (size_t)((end < resized ? end : resized) - first);
    int reach = filter_radius(job->flags[image]);
    taps->places = job->flags[image] & WIDE ? 2 : 1;
    taps->same = axis->scale == 1 && axis->start == floor(axis->start);
    if (taps->same) {
        size_t start = (size_t)((int64_t)axis->start + first - origin);
        taps->count = 1;
        taps->end = start + taps->kept;
        for (size_t k = 0; k < taps->kept; k++)
            taps->firsts[k] = start + (flip ? taps->kept - 1 - k : k);
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
    if (taps->places == 2 && !taps->same)
        widen(taps);
    /* Outputs are made in groups. */
    for (size_t k = taps->kept; k < taps->kept + GROUP; k++) {
        taps->firsts[k] = taps->firsts[taps->kept - 1];
        memset(taps->weights + k * taps->count * taps->places, 0, taps->count * taps->places * sizeof(int16_t));
    }
}

static void find_taps(struct taps *taps, const struct job *job, size_t image, int number, int flip)
{
    find_any(taps, job, image, number, flip);
}

/* How a line of bytes is normalized: a factor and an offset for each of its values. `has_ties` is 1 if one of the results
   is as far from one bfloat16 as from another. */
struct affine {
    float *factors, *offsets;
    int has_ties;
};

/* The forms of the kernel. All give the same bytes. */

typedef void taps_of(struct taps *taps, const struct job *job, size_t image, int number, int flip);
typedef void lines_of(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns, size_t channels);
typedef void line_of(uint8_t *to, const uint8_t *const *lines, const int16_t *weights, size_t count, int precision,
                     size_t nbytes);
typedef void cast_of(void *to, const uint8_t *from, const struct affine *affine, size_t n, enum depth depth);

struct form {
    const char *name;
    taps_of *find_taps;
    lines_of *resample_lines; /* ROWS lines of an image, along themselves. They may be read beyond the last tap. Then come
                                 those that are next. */
    line_of *join_lines;      /* an output line, from an even number of lines. Nothing is written beyond nbytes. */
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

/* A group of outputs has sums of three channels each. If neighbors are near each other, `registers` is 3, and each register
   has four of the twelve sums; if not, it is 4, and each register has an output. A group is an offset for each register,
   from where pixels are loaded; then for each sum a mask that takes two values of a channel; and its weights, a pair for
   each two inputs. */
AVX2 INLINE void make_groups(const struct taps *columns, size_t registers)
{
    const size_t count = columns->count, sums = 4 * registers;
    uint32_t *group = columns->groups;
    for (size_t x = 0; x < columns->kept; x += GROUP, group += 4 + sums * (1 + count / 2)) {
        const size_t *firsts = columns->firsts + x;
#pragma GCC unroll 16
        for (size_t i = 0; i < sums; i++) {
            size_t one = firsts[i / 4 * 4 / registers], other = firsts[(i / 4 * 4 + 3) / registers];
            size_t base = one < other ? one : other, value = 3 * (firsts[i / registers] - base) + i % registers;
            group[i / 4] = (uint32_t)(3 * base);
            group[4 + i] = 0x80038000 + 0x10001 * (uint32_t)value; /* it, none, that of the next pixel, none */
        }
        for (size_t k = 0; k < count / 2; k++)
#pragma GCC unroll 16
            for (size_t i = 0; i < sums; i++)
                memcpy(group + 4 + sums * (1 + k) + i, columns->weights + (x + i / registers) * count + 2 * k, 4);
    }
}

/* A group of each of two lines, in twelve bytes each. Four more bytes are written. */
AVX2 INLINE void store_group(uint8_t *one, uint8_t *other, const __m256i *sums, size_t registers, __m256i precision)
{
    const __m256i packed = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1));
    __m256i first = _mm256_packs_epi32(_mm256_srav_epi32(sums[0], precision), _mm256_srav_epi32(sums[1], precision));
    __m256i last = _mm256_packs_epi32(_mm256_srav_epi32(sums[2], precision),
                                      _mm256_srav_epi32(sums[registers - 1], precision));
    __m256i bytes = _mm256_packus_epi16(first, last);
    if (registers == GROUP)
        bytes = _mm256_shuffle_epi8(bytes, packed);
    _mm_storeu_si128((__m128i *)one, _mm256_castsi256_si128(bytes));
    _mm_storeu_si128((__m128i *)other, _mm256_extracti128_si256(bytes, 1));
}

#define FOUR(VALUES) _mm_loadu_si128((const __m128i *)(VALUES))
#define EACH(ONE, OTHER) _mm256_inserti128_si256(_mm256_castsi128_si256(ONE), OTHER, 1)
#define ADD(SUM, PIXELS, WEIGHTS) SUM = _mm256_add_epi32(SUM, _mm256_madd_epi16(PIXELS, WEIGHTS))

AVX2 INLINE void resample_rgb(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns, size_t count,
                              size_t registers)
{
    const __m256i half = _mm256_set1_epi32(1 << columns->precision >> 1);
    const __m256i precision = _mm256_set1_epi32(columns->precision);
    const size_t sums = 4 * registers;
    const uint32_t *group = columns->groups;
    /* In registers: what is stored might be anything, to the compiler. */
    const uint8_t *from0 = from[0], *from1 = from[1], *from2 = from[2], *from3 = from[3];
    uint8_t *to0 = to[0], *to1 = to[1], *to2 = to[2], *to3 = to[3];
    for (size_t x = 0; x < columns->kept; x += GROUP, group += 4 + sums * (1 + count / 2)) {
        __m256i first[GROUP] = {half, half, half, half}, last[GROUP] = {half, half, half, half};
#pragma GCC unroll 4
        for (size_t i = 0; i < registers; i++) {
            __m256i mask = _mm256_broadcastsi128_si256(FOUR(group + 4 + 4 * i)), one = half, other = half;
#pragma GCC unroll 4
            for (size_t k = 0; k < count / 2; k++) {
                size_t at = group[i] + 6 * k;
                int again = registers == GROUP && k % 2; /* there are two more pixels in the registers */
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
        __builtin_prefetch(from[ROWS + x / GROUP % ROWS] + group[0]);
        store_group(to0 + 3 * x, to1 + 3 * x, first, registers, precision);
        store_group(to2 + 3 * x, to3 + 3 * x, last, registers, precision);
    }
}

AVX2 static void resample_lines_avx2(uint8_t *const *to, const uint8_t *const *from, const struct taps *columns,
                                     size_t channels)
{
    if (channels != 3)
        resample_lines(to, from, columns, channels);
    else if (!columns->are_near)
        resample_rgb(to, from, columns, columns->count, 4);
    else if (columns->count == 2)
        resample_rgb(to, from, columns, 2, 3);
    else if (columns->count == 4)
        resample_rgb(to, from, columns, 4, 3);
    else if (columns->count == 6)
        resample_rgb(to, from, columns, 6, 3);
    else
        resample_rgb(to, from, columns, columns->count, 3);
}

AVX2 static void find_taps_avx2(struct taps *taps, const struct job *job, size_t image, int number, int flip)
{
    find_any(taps, job, image, number, flip);
    if (number != ALONG_COLUMNS || job->channels != 3 || taps->same)
        return;
    taps->are_near = 1;
    for (size_t x = 0; x < taps->kept; x++) {
        size_t one = taps->firsts[x], other = taps->firsts[x + 1];
        taps->are_near &= one + 3 >= other && other + 3 >= one; /* two pixels of each in 16 bytes */
    }
    if (taps->are_near)
        make_groups(taps, 3);
    else
        make_groups(taps, 4);
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

/* Two lines whose weights have a sum of 1: near + (far - near) * weight, in 16 bits. Of the two, far has the lesser weight,
   which has a place even in units of 2^-15. */
AVX2 INLINE void join_two(uint8_t *to, const uint8_t *near, const uint8_t *far, int weight, size_t nbytes)
{
    const __m256i zero = _mm256_setzero_si256(), share = _mm256_set1_epi16((int16_t)weight);
    for (size_t at = 0; at < nbytes; at += sizeof(__m256i)) {
        __m256i one = _mm256_loadu_si256((const __m256i *)(near + at));
        __m256i other = _mm256_loadu_si256((const __m256i *)(far + at));
        __m256i low = _mm256_unpacklo_epi8(one, zero), high = _mm256_unpackhi_epi8(one, zero);
        __m256i step = _mm256_sub_epi16(_mm256_unpacklo_epi8(other, zero), low);
        __m256i next = _mm256_sub_epi16(_mm256_unpackhi_epi8(other, zero), high);
        low = _mm256_add_epi16(low, _mm256_mulhrs_epi16(step, share)); /* which rounds as everything here does */
        high = _mm256_add_epi16(high, _mm256_mulhrs_epi16(next, share));
        store_some(to + at, _mm256_packus_epi16(low, high), nbytes - at);
    }
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
    int one = weights[0], other = weights[1];
    if (count == 2 && one >= 0 && other >= 0 && one + other == 1 << precision)
        join_two(to, lines[one < other], lines[one >= other], (one < other ? one : other) << (15 - precision), nbytes);
    else if (count == 4)
        join_some(to, lines, weights, 4, precision, nbytes);
    else
        join_some(to, lines, weights, count, precision, nbytes);
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
        forms[num_forms++] = (struct form){"avx2", find_taps_avx2, resample_lines_avx2, join_lines_avx2, cast_avx2};
#endif
#if defined(__aarch64__) && defined(__ARM_NEON)
    forms[num_forms++] = (struct form){"neon", find_taps, resample_lines_neon, join_lines_neon, cast};
#endif
    forms[num_forms++] = (struct form){"portable", find_taps, resample_lines, join_lines, cast};
}

static const struct form wide = {"wide", find_taps, resample_wide, join_wide, cast};

/* Memory of one thread. `lines` are resampled lines: that of row number n is in place n modulo `places`. */
struct room {
    struct taps rows, columns;
    size_t places, line_nbytes;
    uint8_t *lines, *bytes, *ends[ROWS]; /* the last rows of the last window, behind which a load would leave its memory */
    const uint8_t **sources;
    struct affine affine;
};

INLINE void mirror_line(uint8_t *to, const uint8_t *from, size_t count, size_t channels)
{
    for (size_t x = 0; x < count; x++, to += channels, from -= channels)
        memcpy(to, from, channels);
}

static void copy_line(uint8_t *to, const uint8_t *from, const struct taps *columns, size_t channels)
{
    if (columns->kept == 1 || columns->firsts[0] < columns->firsts[1]) {
        memcpy(to, from + columns->firsts[0] * channels, columns->kept * channels);
        return;
    }
    from += columns->firsts[0] * channels;
    if (channels == 3) /* a copy of so many bytes is no call */
        mirror_line(to, from, columns->kept, 3);
    else
        mirror_line(to, from, columns->kept, channels);
}

/* The pixels of a window: its lines of `line_nbytes` bytes, `stride` bytes apart, before `end` of what may be read. */
struct shown {
    const uint8_t *first, *end;
    size_t line_nbytes, stride;
};

/* Lines number `row` and those that follow, ROWS of them. Those of number `end` and beyond are of no use. */
static void make_lines(const struct job *job, const struct form *form, struct room *room, const struct shown *shown,
                       size_t row, size_t end)
{
    const struct taps *columns = &room->columns;
    size_t channels = job->channels, reach = columns->count * channels + SLACK;
    const uint8_t *from[2 * ROWS];
    uint8_t *to[ROWS];
    for (size_t i = 0; i < 2 * ROWS; i++)
        from[i] = shown->first + (row + i < end ? row + i : end - 1) * shown->stride;
    for (size_t i = 0, place = row % room->places; i < ROWS; i++, place = place + 1 < room->places ? place + 1 : 0) {
        to[i] = room->lines + place * room->line_nbytes;
        if (columns->same) {
            copy_line(to[i], from[i], columns, channels);
        } else if ((size_t)(shown->end - from[i]) < shown->line_nbytes + reach) {
            memcpy(room->ends[i], from[i], shown->line_nbytes);
            from[i] = room->ends[i];
        }
    }
    if (!columns->same)
        form->resample_lines(to, from, columns, channels);
}

static void resample_one(const struct job *job, const struct form *form, struct room *room, size_t number,
                         const struct shown *shown)
{
    struct taps *rows = &room->rows, *columns = &room->columns;
    size_t n = (size_t)job->size[ALONG_COLUMNS] * job->channels;
    size_t at = (job->lines ? (size_t)job->lines[number] : number) * (size_t)job->size[ALONG_ROWS] * n;
    form = job->flags[number] & WIDE ? &wide : form;
    form->find_taps(rows, job, number, ALONG_ROWS, 0);
    form->find_taps(columns, job, number, ALONG_COLUMNS, job->flags[number] & MIRRORED);
    size_t before = columns->before * job->channels, nbytes = columns->kept * job->channels, made = rows->firsts[0];
    for (size_t y = 0; y < (size_t)job->size[ALONG_ROWS]; y++, at += n) {
        size_t row = y - rows->before;
        /* Bytes go to their place at once. */
        uint8_t *to = job->depth == UINT8 ? (uint8_t *)job->out + at : room->bytes;
        if (y < rows->before || row >= rows->kept) {
            memset(to, 0, n);
        } else {
            size_t first = rows->firsts[row], end = first + rows->count < rows->end ? first + rows->count : rows->end;
            made = made < first ? first : made; /* without antialias, lines between those that are wanted are not */
            for (; made < end; made += ROWS)
                make_lines(job, form, room, shown, made, rows->end);
            for (size_t k = 0, place = first % room->places; k < rows->count; k++) {
                room->sources[k] = room->lines + place * room->line_nbytes;
                if (first + k + 1 < end)
                    place = place + 1 < room->places ? place + 1 : 0;
            }
            if (nbytes < n) {
                memset(to, 0, before);
                memset(to + before + nbytes, 0, n - before - nbytes);
            }
            if (rows->same)
                memcpy(to + before, room->sources[0], nbytes);
            else
                form->join_lines(to + before, room->sources, rows->weights + row * rows->count * rows->places, rows->count,
                                 rows->precision, nbytes);
        }
        if (job->depth != UINT8)
            form->cast((uint8_t *)job->out + at * itemsize_of(job->depth), to, &room->affine, n, job->depth);
    }
}

static int make_taps(struct taps *taps, const struct job *job, int number)
{
    double largest = 1;
    for (size_t i = 0; i < job->count; i++)
        largest = fmax(largest, job->axes[NUM_AXES * i + (size_t)number].scale);
    size_t kept = (size_t)job->size[number], limit = (size_t)job->most[number];
    size_t most = 2 * (size_t)ceil(radius_of(job, largest)) + 2;
    taps->most = ((most < limit ? most : limit) + 1) / 2 * 2;
    taps->firsts = malloc((kept + BLOCK) * sizeof(size_t));
    taps->weights = malloc((kept + BLOCK) * taps->most * sizeof(int32_t));
    taps->exact = malloc((kept + 2 * BLOCK) * taps->most * sizeof(double));
    taps->groups = malloc((kept + GROUP) / GROUP * (20 + 8 * taps->most) * sizeof(uint32_t));
    return taps->firsts && taps->weights && taps->exact && taps->groups;
}

static void free_taps(struct taps *taps)
{
    free(taps->firsts);
    free(taps->weights);
    free(taps->exact);
    free(taps->groups);
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
    size_t channels = job->channels, n = (size_t)job->size[ALONG_COLUMNS] * channels;
    int done = make_taps(&room.rows, job, ALONG_ROWS) && make_taps(&room.columns, job, ALONG_COLUMNS);
    if (done) {
        room.places = room.rows.most + ROWS;
        room.line_nbytes = n + SLACK;
        room.sources = malloc(room.rows.most * sizeof(*room.sources));
        room.lines = calloc(room.places, room.line_nbytes); /* what lies between lines is read, too */
        room.bytes = malloc(n + SLACK);
        room.affine.factors = malloc(n * sizeof(float));
        room.affine.offsets = malloc(n * sizeof(float));
        done = room.sources && room.lines && room.bytes && room.affine.factors && room.affine.offsets;
    }
    for (int i = 0; done && i < ROWS; i++)
        done = !!(room.ends[i] = calloc(((size_t)job->most[ALONG_COLUMNS] + room.columns.most) * channels + SLACK, 1));
    if (done && job->affine)
        find_affine(&room.affine, job, n);
    sigjmp_buf here;
    volatile size_t made = 0;
    if (done && !sigsetjmp(here, 0)) {
        guard->enter(&here);
        for (; made < job->count; made++) {
            const int64_t *window = job->windows + NUM_SIDES * made;
            struct shown shown = {.first = job->pixels + job->places[made], .end = job->pixels + job->nbytes};
            shown.line_nbytes = (size_t)window[WIDTH] * channels;
            shown.stride = job->stride ? job->stride : shown.line_nbytes;
            if (job->stride) /* what lies behind a window of a mapped image may be a page that nobody has */
                shown.end = shown.first + ((size_t)window[HEIGHT] - 1) * shown.stride + shown.line_nbytes;
            resample_one(job, form, &room, made, &shown);
        }
    }
    guard->leave();
#ifdef AVX2
    _mm_sfence(); /* what went past the caches is seen before whatever says that it is there */
#endif
    free_taps(&room.rows);
    free_taps(&room.columns);
    for (int i = 0; i < ROWS; i++)
        free(room.ends[i]);
    free(room.sources);
    free(room.lines);
    free(room.bytes);
    free(room.affine.factors);
    free(room.affine.offsets);
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
        size_t line = (size_t)window[WIDTH] * job->channels, stride = job->stride ? job->stride : line;
        if (job->places[i] < 0 || (size_t)job->places[i] > job->nbytes)
            return 0;
        size_t left = job->nbytes - (size_t)job->places[i];
        if (line > left || line > stride || (size_t)window[HEIGHT] - 1 > (left - line) / stride)
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
    if (!PyArg_ParseTuple(args, "y*y*ny*y*y*z*w*y*n(LL)(LL)(LL)pin:resample", &pixels, &places, &stride, &windows, &axes,
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

static PyMethodDef methods[] = {
    {"resample", resample, METH_VARARGS,
     "resample(pixels, places, stride, windows, axes, flags, lines, out, affine, channels, resized, first, size, "
     "antialias, depth, form)\n\n"
     "out = for each image outputs number `first` to `first + size` of the `resized` ones, along rows and columns, mirrored\n"
     "where its flag has the bit 1, by a cubic filter where it has the bit 2, by Lanczos' with the bit 4, by a box with 8;\n"
     "with weights of 32 bits where it has the bit 16.\n"
     "`pixels` has a window of each, whose first byte is in `places`, with lines `stride` bytes apart, or, with 0, packed.\n"
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
