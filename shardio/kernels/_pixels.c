/* The steps of a batch: what tests/support/pixels_by_torch.py defines by operations of torch, one picture after the other,
   so that a picture stays in the processor's cache until its last step. Operations that replace gray levels by others are
   tables, which are composed until an operation comes that is none. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The loops are left to the compiler, which makes all of it for three generations of processors: `run` below. Products are
   rounded before they are added, as torch's operations do it one by one, unless it is said otherwise: pyproject.toml has the
   flags. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_GENERATIONS
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* shardio/augment/steps.py has the same numbers. */
enum {
    NOTHING,
    BRIGHTNESS,
    CONTRAST,
    SATURATION,
    HUE,
    SHARPNESS,
    POSTERIZE,
    SOLARIZE,
    SOLARIZE_ADD,
    INVERT,
    AUTOCONTRAST,
    EQUALIZE,
    GRAYSCALE,
    BLUR,
    AFFINE,
    PERSPECTIVE,
    MIRROR,
    FLIP,
    ERASE,
    END
};
enum { NEAREST, BILINEAR, PILLOW_BILINEAR, PILLOW_BICUBIC, SAMPLINGS };

#define SAMPLING_AT 8
#define FILL_AT 9
#define MOST_CHANNELS 64

/* A pixel in the fixed point of places. */
#define ONE ((int64_t)1 << 32)
#define HALF (ONE / 2)
/* Beyond every picture, and far from the limits of int64. */
#define FAR_OUT ((double)(1 << 24))
/* Numbers beyond this might become infinite in floats, and the difference of two of them no number. */
#define LARGEST 1e30

struct job {
    uint8_t *pixels;
    const uint8_t *codes;
    const double *values;
    size_t steps, count, height, width, channels, places; /* `places`: values of one picture in one step */
    size_t blur;                                          /* the largest kernel, or 0 */
    int warps;
};

/* Memory of one thread. The picture is in `image`, `other` is as large; each operation may exchange them. */
struct room {
    uint8_t *image, *other, *spare;
    float *line;            /* a line of the picture in floats, with room on both sides for blur */
    float *sum_line;
    uint16_t *thirds;       /* sums of three pixels above each other, and a smoothed line */
    float *ring, *weights;  /* blurred lines, number n in place n modulo the kernel's height; weights of both axes */
    int64_t *columns, *rows;
    float *wide; /* the pixels of three channels, and a fourth number that is not used */
    uint32_t (*counts)[256]; /* four of each channel */
    uint8_t (*table)[256], (*next)[256];
    int tables, same; /* whether `table` waits to be applied; whether it is the first channel's for all of them */
};

#if defined(__GNUC__) && !defined(__clang__) && defined(__SSE2__)
/* Vectors that GCC makes of what the processor has, in each generation. */
#define VECTORS
typedef uint8_t bytes16 __attribute__((vector_size(16)));
#endif

INLINE uint8_t to_byte(float x)
{
    x = x > 0 ? x : 0; /* and no number is 0 */
    return (uint8_t)(int32_t)(x < 255 ? x : 255);
}

INLINE uint8_t rounded(float x)
{
    const float whole = 12582912; /* 1.5 * 2^23: floats beside it are whole numbers */
    x = x > 0 ? x : 0;
    x = x < 255 ? x : 255;
    return (uint8_t)(int32_t)((x + whole) - whole);
}

INLINE uint8_t level_of(double x)
{
    return x > 0 ? x < 255 ? (uint8_t)x : 255 : 0;
}

/* --- Tables --- */

#ifdef FOR_GENERATIONS
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi"))) static inline __m512i look_up(__m512i x, const __m512i *table)
{
    __m512i low = _mm512_permutex2var_epi8(table[0], x, table[1]);
    __m512i high = _mm512_permutex2var_epi8(table[2], x, table[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), low, high);
}

/* Returns how many bytes it has replaced, by tables of one channel or of three. */
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi"))) static size_t apply_wide(uint8_t *pixels, size_t n,
                                                                                         uint8_t (*table)[256],
                                                                                         size_t channels)
{
    __m512i tables[3][4];
    __mmask64 masks[3] = {0, 0, 0};
    for (size_t c = 0; c < channels; c++)
        for (size_t k = 0; k < 4; k++)
            tables[c][k] = _mm512_loadu_si512(table[c] + 64 * k);
    for (size_t i = 0; i < 64; i++)
        masks[i % 3] |= (__mmask64)1 << i;
    size_t i = 0, phase = 0; /* the channel of byte i */
    for (; i + 64 <= n; i += 64) {
        __m512i x = _mm512_loadu_si512(pixels + i), y = look_up(x, tables[0]);
        if (channels == 3) {
            y = _mm512_mask_mov_epi8(y, masks[(4 - phase) % 3], look_up(x, tables[1]));
            y = _mm512_mask_mov_epi8(y, masks[(5 - phase) % 3], look_up(x, tables[2]));
            phase = phase == 2 ? 0 : phase + 1; /* 64 is 1 modulo 3 */
        }
        _mm512_storeu_si512(pixels + i, y);
    }
    return i;
}
#endif

static void apply_tables(const struct job *job, struct room *room)
{
    size_t channels = job->channels, n = job->height * job->width * channels, done = 0;
    uint8_t *pixels = room->image, *table = room->table[0];
    if (!room->tables)
        return;
    room->tables = 0;
#ifdef FOR_GENERATIONS
    if ((room->same || channels == 3) && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl"))
        done = apply_wide(pixels, n, room->table, room->same ? 1 : channels);
#endif
    if (room->same) {
        for (size_t i = done; i < n; i++)
            pixels[i] = table[pixels[i]];
        return;
    }
    /* The first whole pixel that is not done: one that has begun ends first. */
    for (; done % channels; done++)
        pixels[done] = room->table[done % channels][pixels[done]];
    for (size_t i = done; i < n; i += channels)
        for (size_t c = 0; c < channels; c++)
            pixels[i + c] = room->table[c][pixels[i + c]];
}

/* Puts the tables of the next operation, one for all channels or one for each, behind those that wait. */
static void add_tables(const struct job *job, struct room *room, int same)
{
    if (!room->tables) {
        memcpy(room->table, room->next, (same ? 1 : job->channels) * sizeof *room->next);
        room->same = same;
        room->tables = 1;
        return;
    }
    if (room->same && !same)
        for (size_t c = 1; c < job->channels; c++)
            memcpy(room->table[c], room->table[0], sizeof *room->table);
    room->same = room->same && same;
    for (size_t c = 0; c < (room->same ? 1 : job->channels); c++)
        for (size_t i = 0; i < 256; i++)
            room->table[c][i] = room->next[same ? 0 : c][room->table[c][i]];
}

static void count_levels(const struct job *job, struct room *room)
{
    size_t channels = job->channels, n = job->height * job->width;
    uint32_t(*counts)[256] = room->counts;
    memset(counts, 0, 4 * channels * sizeof *counts);
    if (channels == 3) {
        /* Neighbors are often alike, and a count has to be written before it can be read again. */
        const uint8_t *at = room->image;
        size_t i = 0;
        for (; i + 4 <= n; i += 4, at += 12)
            for (size_t k = 0; k < 4; k++) {
                counts[3 * k][at[3 * k]]++;
                counts[3 * k + 1][at[3 * k + 1]]++;
                counts[3 * k + 2][at[3 * k + 2]]++;
            }
        for (; i < n; i++, at += 3)
            for (size_t c = 0; c < 3; c++)
                counts[c][at[c]]++;
    } else {
        const uint8_t *at = room->image;
        for (size_t i = 0; i < n; i++, at += channels)
            for (size_t c = 0; c < channels; c++)
                counts[(i & 3) * channels + c][at[c]]++;
    }
    for (size_t c = 0; c < channels; c++)
        for (size_t i = 0; i < 256; i++)
            counts[c][i] += counts[channels + c][i] + counts[2 * channels + c][i] + counts[3 * channels + c][i];
}

static void equalize(const struct job *job, struct room *room)
{
    int64_t n = (int64_t)(job->height * job->width);
    count_levels(job, room);
    for (size_t c = 0; c < job->channels; c++) {
        int64_t counts[256] = {0}, below = 0, brightest = 0;
        /* What the tables that wait will make of the picture. */
        for (size_t i = 0; i < 256; i++)
            counts[room->tables ? room->table[room->same ? 0 : c][i] : i] += room->counts[c][i];
        for (size_t i = 0; i < 256; i++)
            if (counts[i])
                brightest = counts[i];
        int64_t step = (n - brightest) / 255;
        for (size_t i = 0; i < 256; i++) {
            int64_t level = step ? (below + step / 2) / step : (int64_t)i;
            room->next[c][i] = (uint8_t)(level < 255 ? level : 255);
            below += counts[i];
        }
    }
    add_tables(job, room, job->channels == 1);
}

static void autocontrast(const struct job *job, struct room *room)
{
    size_t channels = job->channels, n = job->height * job->width * channels, block = 64 * channels, i = 0;
    uint8_t least[64 * MOST_CHANNELS], most[64 * MOST_CHANNELS];
    apply_tables(job, room);
    const uint8_t *restrict pixels = room->image;
    memset(least, 255, block);
    memset(most, 0, block);
    for (; i + block <= n; i += block)
        for (size_t k = 0; k < block; k++) {
            uint8_t x = pixels[i + k];
            least[k] = x < least[k] ? x : least[k];
            most[k] = x > most[k] ? x : most[k];
        }
    for (size_t k = 0; i + k < n; k++) {
        uint8_t x = pixels[i + k];
        least[k] = x < least[k] ? x : least[k];
        most[k] = x > most[k] ? x : most[k];
    }
    for (size_t c = 0; c < channels; c++) {
        uint8_t low = 255, high = 0;
        for (size_t k = c; k < block; k += channels) {
            low = least[k] < low ? least[k] : low;
            high = most[k] > high ? most[k] : high;
        }
        float step = low == high ? 1 : (float)(high - low) * (float)(1.0 / 255), first = low == high ? 0 : low;
        for (size_t k = 0; k < 256; k++)
            room->next[c][k] = to_byte(((float)k - first) / step);
    }
    add_tables(job, room, channels == 1);
}

static void blend_with(struct room *room, float other, double factor)
{
    float share = (float)factor, rest = (float)(1.0 - factor);
    for (size_t i = 0; i < 256; i++)
        room->next[0][i] = to_byte((float)i * share + other * rest);
}

/* Fills `next`, one table for all channels. */
static void make_table(struct room *room, int code, const double *values)
{
    double steps = code == POSTERIZE ? pow(2.0, 8 - values[0]) : 1;
    for (size_t i = 0; i < 256; i++) {
        double x = (double)i;
        uint8_t *to = &room->next[0][i];
        switch (code) {
        case BRIGHTNESS:
            *to = to_byte((float)i * (float)values[0]);
            break;
        case POSTERIZE:
            *to = level_of(floor(x / steps) * steps);
            break;
        case SOLARIZE:
            *to = level_of(x >= values[0] ? 255 - x : x);
            break;
        case SOLARIZE_ADD:
            *to = level_of(x < values[1] ? x + trunc(values[0]) : x);
            break;
        default: /* INVERT */
            *to = (uint8_t)(255 - i);
        }
    }
}

/* --- Colors: pictures of three channels --- */

/* `fused`: as torch, which adds a product before it is rounded where the processor can, so that all bits are the same. */
INLINE float add_product(float sum, float x, float y, int fused)
{
    return fused ? __builtin_fmaf(x, y, sum) : sum + x * y;
}

/* Whole gray levels: what is below 2^31 and not negative is cut down as by floor. */
INLINE float gray_of(float red, float green, float blue, int fused)
{
    return (float)(int32_t)add_product(add_product(red * 0.2989f, green, 0.587f, fused), blue, 0.114f, fused);
}

/* So many pixels at a time are taken apart into planes, one for each channel, which the compiler can make much of. */
#define TILE 512

struct tile {
    uint8_t reds[TILE], greens[TILE], blues[TILE];
};

#ifdef VECTORS
INLINE bytes16 picked(bytes16 a, bytes16 b, bytes16 c, bytes16 of_two, bytes16 with_third)
{
    return __builtin_shuffle(__builtin_shuffle(a, b, of_two), c, with_third);
}
#endif

INLINE void split(struct tile *restrict to, const uint8_t *restrict from, size_t n)
{
    size_t x = 0;
#ifdef VECTORS
    for (; x + 16 <= n; x += 16) {
        bytes16 a, b, c;
        memcpy(&a, from + 3 * x, 16);
        memcpy(&b, from + 3 * x + 16, 16);
        memcpy(&c, from + 3 * x + 32, 16);
        bytes16 red = picked(a, b, c, (bytes16){0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 0, 0, 0, 0, 0},
                             (bytes16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 17, 20, 23, 26, 29});
        bytes16 green = picked(a, b, c, (bytes16){1, 4, 7, 10, 13, 16, 19, 22, 25, 28, 31, 0, 0, 0, 0, 0},
                               (bytes16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 18, 21, 24, 27, 30});
        bytes16 blue = picked(a, b, c, (bytes16){2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 0, 0, 0, 0, 0, 0},
                              (bytes16){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 19, 22, 25, 28, 31});
        memcpy(to->reds + x, &red, 16);
        memcpy(to->greens + x, &green, 16);
        memcpy(to->blues + x, &blue, 16);
    }
#endif
    for (; x < n; x++) {
        to->reds[x] = from[3 * x];
        to->greens[x] = from[3 * x + 1];
        to->blues[x] = from[3 * x + 2];
    }
}

INLINE void join(uint8_t *restrict to, const uint8_t *restrict reds, const uint8_t *restrict greens,
                 const uint8_t *restrict blues, size_t n)
{
    size_t x = 0;
#ifdef VECTORS
    for (; x + 16 <= n; x += 16) {
        bytes16 r, g, b;
        memcpy(&r, reds + x, 16);
        memcpy(&g, greens + x, 16);
        memcpy(&b, blues + x, 16);
        bytes16 first = picked(r, g, b, (bytes16){0, 16, 0, 1, 17, 0, 2, 18, 0, 3, 19, 0, 4, 20, 0, 5},
                               (bytes16){0, 1, 16, 3, 4, 17, 6, 7, 18, 9, 10, 19, 12, 13, 20, 15});
        bytes16 second = picked(r, g, b, (bytes16){21, 0, 6, 22, 0, 7, 23, 0, 8, 24, 0, 9, 25, 0, 10, 26},
                                (bytes16){0, 21, 2, 3, 22, 5, 6, 23, 8, 9, 24, 11, 12, 25, 14, 15});
        bytes16 third = picked(r, g, b, (bytes16){0, 11, 27, 0, 12, 28, 0, 13, 29, 0, 14, 30, 0, 15, 31, 0},
                               (bytes16){26, 1, 2, 27, 4, 5, 28, 7, 8, 29, 10, 11, 30, 13, 14, 31});
        memcpy(to + 3 * x, &first, 16);
        memcpy(to + 3 * x + 16, &second, 16);
        memcpy(to + 3 * x + 32, &third, 16);
    }
#endif
    for (; x < n; x++) {
        to[3 * x] = reds[x];
        to[3 * x + 1] = greens[x];
        to[3 * x + 2] = blues[x];
    }
}

INLINE uint32_t sum_tile(const struct tile *restrict tile, size_t n, int fused)
{
    uint32_t sum = 0;
    for (size_t x = 0; x < n; x++)
        sum += (uint32_t)(int32_t)gray_of(tile->reds[x], tile->greens[x], tile->blues[x], fused);
    return sum;
}

INLINE void gray_tile(uint8_t *restrict grays, const struct tile *restrict tile, size_t n, int fused)
{
    for (size_t x = 0; x < n; x++)
        grays[x] = (uint8_t)(int32_t)gray_of(tile->reds[x], tile->greens[x], tile->blues[x], fused);
}

INLINE void saturate_tile(uint8_t *restrict reds, uint8_t *restrict greens, uint8_t *restrict blues, float share,
                          float rest, size_t n, int fused)
{
    for (size_t x = 0; x < n; x++) {
        float red = reds[x], green = greens[x], blue = blues[x];
        float other = gray_of(red, green, blue, fused) * rest;
        reds[x] = to_byte(red * share + other);
        greens[x] = to_byte(green * share + other);
        blues[x] = to_byte(blue * share + other);
    }
}

/* The share of the chroma at `distance` sixths of the circle from a channel's own hue. */
INLINE float share_of(float distance)
{
    float share = 2 - fabsf(distance);
    share = share > 0 ? share : 0;
    return share < 1 ? share : 1;
}

/* `by` is less than LARGEST, and need not fit into an int. */
INLINE void turn_tile(uint8_t *restrict reds, uint8_t *restrict greens, uint8_t *restrict blues, float by, size_t n)
{
    const float scale = 255.999f / 255;
    for (size_t x = 0; x < n; x++) {
        float red = reds[x], green = greens[x], blue = blues[x];
        float most = red > green ? red : green, least = red < green ? red : green;
        most = most > blue ? most : blue;
        least = least < blue ? least : blue;
        float chroma = most - least;
        float gap = most == green ? blue - red : red - green, third = most == green ? 2.0f : 4.0f;
        gap = most == red ? green - blue : gap;
        third = most == red ? 0.0f : third;
        float hue = (third + gap / (chroma > 0 ? chroma : 1)) * (1.0f / 6) + by;
        hue = (hue - floorf(hue)) * 6;
        reds[x] = (uint8_t)(int32_t)((most - chroma * share_of(hue - 3)) * scale);
        greens[x] = (uint8_t)(int32_t)((least + chroma * share_of(hue - 2)) * scale);
        blues[x] = (uint8_t)(int32_t)((least + chroma * share_of(hue - 4)) * scale);
    }
}

INLINE uint64_t sum_of_gray(const struct job *job, struct room *room, int fused)
{
    uint64_t sum = 0;
    size_t n = job->height * job->width;
    struct tile tile;
    if (job->channels == 1) {
        for (size_t i = 0; i < n; i++)
            sum += room->image[i];
        return sum;
    }
    for (size_t i = 0, some; i < n; i += some) {
        some = n - i < TILE ? n - i : TILE;
        split(&tile, room->image + 3 * i, some);
        sum += sum_tile(&tile, some, fused);
    }
    return sum;
}

/* SATURATION, HUE and GRAYSCALE of three channels. */
INLINE void change_colors(const struct job *job, struct room *room, int code, double value, int fused)
{
    size_t n = job->height * job->width;
    float share = (float)value, rest = (float)(1.0 - value);
    struct tile tile;
    uint8_t grays[TILE];
    for (size_t i = 0, some; i < n; i += some) {
        uint8_t *at = room->image + 3 * i;
        some = n - i < TILE ? n - i : TILE;
        split(&tile, at, some);
        if (code == HUE) {
            turn_tile(tile.reds, tile.greens, tile.blues, share, some);
        } else if (code == SATURATION) {
            saturate_tile(tile.reds, tile.greens, tile.blues, share, rest, some, fused);
        } else {
            gray_tile(grays, &tile, some, fused);
            join(at, grays, grays, grays, some);
            continue;
        }
        join(at, tile.reds, tile.greens, tile.blues, some);
    }
}

/* --- Neighbors --- */

static void exchange(struct room *room)
{
    uint8_t *image = room->image;
    room->image = room->other;
    room->other = image;
}

INLINE void sharpen_line(uint8_t *restrict to, const uint8_t *restrict above, const uint8_t *restrict at,
                         const uint8_t *restrict below, uint16_t *restrict thirds, uint16_t *restrict smooth, float rest,
                         size_t channels, size_t n)
{
    for (size_t i = 0; i < n; i++)
        thirds[i] = (uint16_t)(above[i] + at[i] + below[i]);
    /* A thirteenth of the eight neighbors and of five times the pixel, rounded: never half-way between two. */
    for (size_t i = channels; i < n - channels; i++) {
        uint16_t sum = (uint16_t)(thirds[i - channels] + thirds[i] + thirds[i + channels] + 4 * at[i] + 6);
        smooth[i] = (uint16_t)(sum * 5042u >> 16);
    }
    for (size_t i = channels; i < n - channels; i++) {
        float pixel = at[i];
        to[i] = to_byte(pixel + ((float)smooth[i] - pixel) * rest);
    }
}

INLINE void sharpen(const struct job *job, struct room *room, double factor)
{
    size_t channels = job->channels, n = job->width * channels, last = (job->height - 1) * n;
    float rest = (float)(1.0 - factor);
    if (job->height <= 2 || job->width <= 2)
        return;
    memcpy(room->other, room->image, n);
    memcpy(room->other + last, room->image + last, n);
    for (size_t y = 1; y + 1 < job->height; y++) {
        const uint8_t *at = room->image + y * n;
        uint8_t *to = room->other + y * n;
        sharpen_line(to, at - n, at, at + n, room->thirds, room->thirds + n, rest, channels, n);
        memcpy(to, at, channels);
        memcpy(to + n - channels, at + n - channels, channels);
    }
    exchange(room);
}

/* Weights of a Gaussian kernel, whose sum is 1. */
static void find_weights(float *weights, size_t size, double sigma)
{
    double sum = 0, reach = (double)(size / 2), narrow = 2.0 * sigma * sigma;
    for (size_t i = 0; i < size; i++)
        sum += exp(-((double)i - reach) * ((double)i - reach) / narrow);
    for (size_t i = 0; i < size; i++)
        weights[i] = (float)(exp(-((double)i - reach) * ((double)i - reach) / narrow) / sum);
}

INLINE size_t reflected(ptrdiff_t at, size_t size)
{
    at = at < 0 ? -at : at;
    return at < (ptrdiff_t)size ? (size_t)at : 2 * size - 2 - (size_t)at;
}

INLINE void add_four(float *restrict to, const float *a, const float *b, const float *c, const float *d,
                     const float *weights, size_t n)
{
    float p = weights[0], q = weights[1], r = weights[2], s = weights[3];
    for (size_t i = 0; i < n; i++)
        to[i] += a[i] * p + b[i] * q + (c[i] * r + d[i] * s);
}

INLINE void add_three(float *restrict to, const float *a, const float *b, const float *c, const float *weights, size_t n)
{
    float p = weights[0], q = weights[1], r = weights[2];
    for (size_t i = 0; i < n; i++)
        to[i] += a[i] * p + b[i] * q + c[i] * r;
}

INLINE void add_one(float *restrict to, const float *a, float weight, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] += a[i] * weight;
}

/* A line, blurred along itself. */
INLINE void blur_line(float *restrict to, float *restrict line, const uint8_t *restrict from, const float *weights,
                      size_t size, size_t width, size_t channels)
{
    size_t reach = size / 2, n = width * channels, k = 0;
    for (size_t i = 0; i < n; i++)
        line[reach * channels + i] = from[i];
    for (size_t i = 0; i < reach; i++)
        for (size_t c = 0; c < channels; c++) {
            line[i * channels + c] = from[reflected((ptrdiff_t)i - (ptrdiff_t)reach, width) * channels + c];
            line[(reach + width + i) * channels + c] = from[reflected((ptrdiff_t)(width + i), width) * channels + c];
        }
    memset(to, 0, n * sizeof *to);
    for (; k + 4 <= size; k += 4) {
        const float *at = line + k * channels;
        add_four(to, at, at + channels, at + 2 * channels, at + 3 * channels, weights + k, n);
    }
    if (k + 3 == size)
        add_three(to, line + k * channels, line + (k + 1) * channels, line + (k + 2) * channels, weights + k, n);
    else
        for (; k < size; k++)
            add_one(to, line + k * channels, weights[k], n);
}

INLINE void blur(const struct job *job, struct room *room, const double *values)
{
    size_t wide = (size_t)values[0], high = (size_t)values[1], reach = high / 2, made = 0;
    size_t height = job->height, n = job->width * job->channels;
    float *across = room->weights, *down = across + wide, *sums = room->sum_line;
    find_weights(across, wide, values[2]);
    find_weights(down, high, values[3]);
    for (size_t y = 0; y < height; y++) {
        for (; made <= y + reach && made < height; made++)
            blur_line(room->ring + made % high * n, room->line, room->image + made * n, across, wide, job->width,
                      job->channels);
        /* The reflections of lines beyond the edge lie among those that are there. */
#define LINE(K) (room->ring + reflected((ptrdiff_t)(y + (K)) - (ptrdiff_t)reach, height) % high * n)
        size_t k = 0;
        memset(sums, 0, n * sizeof *sums);
        for (; k + 4 <= high; k += 4)
            add_four(sums, LINE(k), LINE(k + 1), LINE(k + 2), LINE(k + 3), down + k, n);
        if (k + 3 == high)
            add_three(sums, LINE(k), LINE(k + 1), LINE(k + 2), down + k, n);
        else
            for (; k < high; k++)
                add_one(sums, LINE(k), down[k], n);
        uint8_t *restrict to = room->other + y * n;
        for (size_t i = 0; i < n; i++)
            to[i] = rounded(sums[i]);
    }
    exchange(room);
}

/* --- Places --- */

struct affine {
    int64_t a, b, c, d, e, f; /* pixel (x, y) is read at (a x + b y + c, d x + e y + f) */
};

static int64_t fixed(double x)
{
    return (int64_t)rint(x * (double)ONE);
}

static double limited(double x, double limit)
{
    return x < -limit ? -limit : x > limit ? limit : x;
}

static struct affine affine_of(const struct job *job, const double *values)
{
    double limit = FAR_OUT * (1 / (double)(job->height > job->width ? job->height : job->width)), m[6];
    for (size_t i = 0; i < 6; i++)
        m[i] = limited(values[i], i % 3 == 2 ? FAR_OUT : limit);
    struct affine made = {fixed(m[0]), fixed(m[1]), fixed(m[0] / 2 + m[1] / 2 + m[2]),
                          fixed(m[3]), fixed(m[4]), fixed(m[3] / 2 + m[4] / 2 + m[5])};
    return made;
}

static int64_t floor_div(int64_t x, int64_t by)
{
    int64_t whole = x / by;
    return whole - (x % by != 0 && (x < 0) != (by < 0));
}

/* Narrows [*first, *end) to those x for which `start + step * x` lies in [0, limit). */
static void narrow(int64_t *first, int64_t *end, int64_t start, int64_t step, int64_t limit)
{
    int64_t low = 0, high = *end;
    if (step == 0) {
        if (start < 0 || start >= limit)
            high = 0;
    } else if (step > 0) {
        low = -floor_div(start, step);
        high = floor_div(limit - 1 - start, step) + 1;
    } else {
        low = -floor_div(limit - 1 - start, -step);
        high = floor_div(start, -step) + 1;
    }
    *first = low > *first ? low : *first;
    *end = high < *end ? high : *end;
}

INLINE void fill_pixels(uint8_t *to, const uint8_t *fill, int64_t first, int64_t end, size_t channels)
{
    for (int64_t x = first; x < end; x++)
        for (size_t c = 0; c < channels; c++)
            to[(size_t)x * channels + c] = fill[c];
}

INLINE void warp_nearest(const struct job *job, struct room *room, struct affine map, const uint8_t *fill)
{
    size_t channels = job->channels, n = job->width * channels;
    int64_t width = (int64_t)job->width, wide = width * ONE, high = (int64_t)job->height * ONE;
    const uint8_t *image = room->image;
    for (size_t y = 0; y < job->height; y++) {
        uint8_t *to = room->other + y * n;
        int64_t u = map.b * (int64_t)y + map.c, v = map.e * (int64_t)y + map.f, first = 0, end = width;
        narrow(&first, &end, u, map.a, wide);
        narrow(&first, &end, v, map.d, high);
        if (end <= first)
            first = end = width;
        fill_pixels(to, fill, 0, first, channels);
        fill_pixels(to, fill, end, width, channels);
        u += first * map.a;
        v += first * map.d;
        if (map.a == ONE && map.d == 0) {
            if (first < end)
                memcpy(to + (size_t)first * channels,
                       image + (size_t)(v >> 32) * n + (size_t)(u >> 32) * channels,
                       (size_t)(end - first) * channels);
        } else if (channels == 3) {
            for (int64_t x = first; x < end; x++, u += map.a, v += map.d) {
                const uint8_t *from = image + ((size_t)(v >> 32) * job->width + (size_t)(u >> 32)) * 3;
                memcpy(to + 3 * x, from, 2);
                to[3 * x + 2] = from[2];
            }
        } else {
            for (int64_t x = first; x < end; x++, u += map.a, v += map.d) {
                const uint8_t *from = image + ((size_t)(v >> 32) * job->width + (size_t)(u >> 32)) * channels;
                for (size_t c = 0; c < channels; c++)
                    to[(size_t)x * channels + c] = from[c];
            }
        }
    }
    exchange(room);
}

/* A whole number of at most 2^51, as its double: such sums have a bit for each unit. Vectors have no conversion for it. */
INLINE int64_t whole_of(double x)
{
    const double unit = 0x1.8p52;
    int64_t bits, zero;
    x += unit;
    memcpy(&bits, &x, sizeof bits);
    memcpy(&zero, &unit, sizeof zero);
    return bits - zero;
}

/* Rounds to the nearest multiple of 2^-32. */
INLINE int64_t place_of(double place)
{
    place = place == place ? place : FAR_OUT;
    place = place < -FAR_OUT ? -FAR_OUT : place;
    place = place < FAR_OUT ? place : FAR_OUT;
    double whole = floor(place);
    return whole_of(whole) * ONE + whole_of((place - whole) * (double)ONE);
}

/* Where the pixels of line `y` are read. */
INLINE void find_places(const struct job *job, const struct room *room, const double *values, const struct affine *map,
                        size_t y)
{
    int64_t *restrict columns = room->columns, *restrict rows = room->rows;
    size_t width = job->width; /* in a register: what is stored might be it, to the compiler */
    if (map) {
        int64_t u = map->b * (int64_t)y + map->c, v = map->e * (int64_t)y + map->f;
        int64_t a = map->a, d = map->d;
        for (size_t x = 0; x < width; x++) {
            columns[x] = u + a * (int64_t)x;
            rows[x] = v + d * (int64_t)x;
        }
        return;
    }
    double m[8], down = (double)y + 0.5;
    memcpy(m, values, sizeof m);
    for (int32_t x = 0; x < (int32_t)width; x++) {
        double across = x + 0.5, depth = m[6] * across + m[7] * down + 1.0;
        columns[x] = place_of((m[0] * across + m[1] * down + m[2]) / depth);
        rows[x] = place_of((m[3] * across + m[4] * down + m[5]) / depth);
    }
}

INLINE int is_inside(int64_t at, size_t limit)
{
    return (uint64_t)at < (uint64_t)limit;
}

INLINE float fraction_of(int64_t place)
{
    return (float)(int32_t)((uint32_t)place >> 8) * 0x1p-24f;
}

INLINE int64_t inner(int64_t at, size_t limit)
{
    return at < 0 ? 0 : at < (int64_t)limit ? at : (int64_t)limit - 1;
}

#ifdef __SSE2__
/* Whole numbers are cut down to gray levels. */
INLINE void store_levels(uint8_t *to, __m128i values)
{
    __m128i words = _mm_packs_epi32(values, values);
    int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    to[0] = (uint8_t)bytes;
    to[1] = (uint8_t)(bytes >> 8);
    to[2] = (uint8_t)(bytes >> 16);
}
#endif

INLINE void read_bilinear(const struct job *job, const uint8_t *image, uint8_t *to, int64_t u, int64_t v,
                          const float *fill, size_t channels)
{
    float right = fraction_of(u), low = fraction_of(v);
    int64_t column = u >> 32, row = v >> 32;
    float by_row[2] = {1 - low, low}, by_column[2] = {1 - right, right}, shares[4], covered = 0;
    const uint8_t *from[4];
    for (int k = 0; k < 4; k++) {
        int64_t x = column + (k & 1), y = row + (k >> 1);
        int inside = is_inside(x, job->width) && is_inside(y, job->height);
        shares[k] = inside ? by_row[k >> 1] * by_column[k & 1] : 0;
        from[k] = image + (inside ? ((size_t)y * job->width + (size_t)x) * channels : 0);
        covered += shares[k];
    }
    for (size_t c = 0; c < channels; c++) {
        float total = 0;
        for (int k = 0; k < 4; k++)
            total += (float)from[k][c] * shares[k];
        /* No number is no fill. */
        to[c] = rounded(fill[c] == fill[c] ? (total - fill[c]) * covered + fill[c] : total);
    }
}

INLINE float between(float a, float b, float t)
{
    return a + (b - a) * t;
}

/* Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -1: between b and c. */
INLINE float cubic(float a, float b, float c, float d, float t)
{
    return b + ((c - a) + (((a - b) * 2 + (c - d)) + ((b - a) + (d - c)) * t) * t) * t;
}

#ifdef __SSE2__
INLINE __m128 between_four(__m128 a, __m128 b, __m128 t)
{
    return _mm_add_ps(a, _mm_mul_ps(_mm_sub_ps(b, a), t));
}

INLINE __m128 cubic_four(__m128 a, __m128 b, __m128 c, __m128 d, __m128 t)
{
    __m128 ab = _mm_sub_ps(a, b), cd = _mm_sub_ps(c, d), twice = _mm_add_ps(ab, ab);
    __m128 last = _mm_sub_ps(_mm_sub_ps(_mm_setzero_ps(), ab), cd);
    __m128 sum = _mm_add_ps(_mm_add_ps(twice, cd), _mm_mul_ps(last, t));
    return _mm_add_ps(b, _mm_mul_ps(_mm_add_ps(_mm_sub_ps(c, a), _mm_mul_ps(sum, t)), t));
}

/* `at`: pixels as `widen` makes them, in lines of `stride` floats. */
INLINE __m128 bicubic_of(const float *at, size_t stride, float right, float low)
{
    __m128 columns[4], t = _mm_set1_ps(low);
    for (size_t i = 0; i < 4; i++, at += 4)
        columns[i] = cubic_four(_mm_loadu_ps(at), _mm_loadu_ps(at + stride), _mm_loadu_ps(at + 2 * stride),
                                _mm_loadu_ps(at + 3 * stride), t);
    return cubic_four(columns[0], columns[1], columns[2], columns[3], _mm_set1_ps(right));
}

INLINE __m128 bilinear_of(const float *at, size_t stride, float right, float low)
{
    __m128 t = _mm_set1_ps(low);
    return between_four(between_four(_mm_loadu_ps(at), _mm_loadu_ps(at + stride), t),
                        between_four(_mm_loadu_ps(at + 4), _mm_loadu_ps(at + stride + 4), t), _mm_set1_ps(right));
}
#endif

/* The same bits with SSE2 and without it. `read_bilinear` would round some of them differently. */
INLINE void read_inside(uint8_t *to, const float *at, size_t stride, float right, float low)
{
#ifdef __SSE2__
    store_levels(to, _mm_cvtps_epi32(bilinear_of(at, stride, right, low)));
#else
    for (size_t c = 0; c < 3; c++, at++)
        to[c] = rounded(between(between(at[0], at[stride], low), between(at[4], at[stride + 4], low), right));
#endif
}

INLINE void bilinear_line(const struct job *job, const struct room *room, uint8_t *to, const float *fill)
{
    size_t channels = job->channels, width = job->width, height = job->height;
    for (size_t x = 0; x < width; x++, to += channels) {
        int64_t u = room->columns[x] - HALF, v = room->rows[x] - HALF, column = u >> 32, row = v >> 32;
        /* All four pixels are there, so that no fill is seen. */
        if (channels == 3 && is_inside(column, width - 1) && is_inside(row, height - 1)) {
            const float *at = room->wide + ((size_t)row * width + (size_t)column) * 4;
            read_inside(to, at, 4 * width, fraction_of(u), fraction_of(v));
            continue;
        }
        if (is_inside(column + 1, width + 1) && is_inside(row + 1, height + 1)) {
            read_bilinear(job, room->image, to, u, v, fill, channels);
            continue;
        }
        for (size_t c = 0; c < channels; c++)
            to[c] = rounded(fill[c]);
    }
}

/* As Pillow has it: `taps` pixels along each axis, of which those at the edge go on outside. */
INLINE void pillow_line_of(const struct job *job, const struct room *room, uint8_t *to, const uint8_t *fill, int taps,
                           size_t channels)
{
    size_t width = job->width, height = job->height, stride = width * channels;
    const uint8_t *image = room->image;
    for (size_t x = 0; x < width; x++, to += channels) {
        int64_t u = room->columns[x], v = room->rows[x];
        if (!is_inside(u >> 32, width) || !is_inside(v >> 32, height)) {
            for (size_t c = 0; c < channels; c++)
                to[c] = fill[c];
            continue;
        }
        float right = fraction_of(u -= HALF), low = fraction_of(v -= HALF);
        int64_t column = (u >> 32) - taps / 4, row = (v >> 32) - taps / 4;
#ifdef __SSE2__
        if (channels == 3 && column >= 0 && row >= 0 && column + taps <= (int64_t)width && row + taps <= (int64_t)height) {
            const float *at = room->wide + ((size_t)row * width + (size_t)column) * 4;
            __m128 total = taps == 4 ? bicubic_of(at, 4 * width, right, low) : bilinear_of(at, 4 * width, right, low);
            store_levels(to, _mm_cvttps_epi32(total));
            continue;
        }
#endif
        size_t columns[4];
        const uint8_t *lines[4];
        for (int k = 0; k < taps; k++) {
            columns[k] = (size_t)inner(column + k, width) * channels;
            lines[k] = image + (size_t)inner(row + k, height) * stride;
        }
        for (size_t c = 0; c < channels; c++) {
            float line[4];
            for (int i = 0; i < taps; i++) {
                const size_t at = columns[i] + c;
                line[i] = taps == 4 ? cubic(lines[0][at], lines[1][at], lines[2][at], lines[3][at], low)
                                    : between(lines[0][at], lines[1][at], low);
            }
            to[c] = to_byte(taps == 4 ? cubic(line[0], line[1], line[2], line[3], right)
                                      : between(line[0], line[1], right));
        }
    }
}

INLINE void pillow_line(const struct job *job, const struct room *room, uint8_t *to, const uint8_t *fill, int cubic)
{
    if (job->channels == 3 && cubic)
        pillow_line_of(job, room, to, fill, 4, 3);
    else if (job->channels == 3)
        pillow_line_of(job, room, to, fill, 2, 3);
    else
        pillow_line_of(job, room, to, fill, cubic ? 4 : 2, job->channels);
}

INLINE void nearest_line(const struct job *job, const struct room *room, uint8_t *to, const uint8_t *fill, size_t channels)
{
    const int64_t *columns = room->columns, *rows = room->rows;
    const uint8_t *image = room->image;
    size_t width = job->width, height = job->height;
    for (size_t x = 0; x < width; x++, to += channels) {
        int64_t column = columns[x] >> 32, row = rows[x] >> 32;
        int inside = is_inside(column, width) && is_inside(row, height);
        const uint8_t *from = inside ? image + ((size_t)row * width + (size_t)column) * channels : fill;
        for (size_t c = 0; c < channels; c++)
            to[c] = from[c];
    }
}

INLINE void widen(float *restrict to, const uint8_t *restrict from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        to[4 * i] = from[3 * i];
        to[4 * i + 1] = from[3 * i + 1];
        to[4 * i + 2] = from[3 * i + 2];
        to[4 * i + 3] = 0;
    }
}

INLINE void warp(const struct job *job, struct room *room, int code, const double *values)
{
    int sampling = (int)values[SAMPLING_AT];
    float fill[MOST_CHANNELS];
    uint8_t levels[MOST_CHANNELS]; /* where no fill is black */
    struct affine map = {0, 0, 0, 0, 0, 0};
    for (size_t c = 0; c < job->channels; c++) {
        fill[c] = (float)values[FILL_AT + c];
        levels[c] = sampling == NEAREST ? rounded(fill[c]) : to_byte(fill[c]);
    }
    if (code == AFFINE)
        map = affine_of(job, values);
    if (code == AFFINE && sampling == NEAREST) {
        warp_nearest(job, room, map, levels);
        return;
    }
    if (job->channels == 3 && sampling != NEAREST)
        widen(room->wide, room->image, job->height * job->width);
    for (size_t y = 0; y < job->height; y++) {
        uint8_t *to = room->other + y * job->width * job->channels;
        find_places(job, room, values, code == AFFINE ? &map : NULL, y);
        if (sampling == NEAREST && job->channels == 3)
            nearest_line(job, room, to, levels, 3);
        else if (sampling == NEAREST)
            nearest_line(job, room, to, levels, job->channels);
        else if (sampling == BILINEAR)
            bilinear_line(job, room, to, fill);
        else
            pillow_line(job, room, to, levels, sampling == PILLOW_BICUBIC);
    }
    exchange(room);
}

INLINE void mirror(const struct job *job, struct room *room)
{
    size_t channels = job->channels, width = job->width, n = width * channels;
    for (size_t y = 0; y < job->height; y++) {
        const uint8_t *from = room->image + y * n;
        uint8_t *to = room->other + (y + 1) * n;
        if (channels == 3) {
            for (size_t x = 0; x < width; x++, from += 3) {
                to -= 3;
                memcpy(to, from, 2);
                to[2] = from[2];
            }
        } else {
            for (size_t x = 0; x < width; x++, from += channels) {
                to -= channels;
                for (size_t c = 0; c < channels; c++)
                    to[c] = from[c];
            }
        }
    }
    exchange(room);
}

static void flip(const struct job *job, struct room *room)
{
    size_t n = job->width * job->channels;
    for (size_t y = 0; y < job->height; y++)
        memcpy(room->other + (job->height - 1 - y) * n, room->image + y * n, n);
    exchange(room);
}

static void erase(const struct job *job, struct room *room, const double *values)
{
    size_t channels = job->channels, top = (size_t)values[0], left = (size_t)values[1];
    size_t end = top + (size_t)values[2], right = left + (size_t)values[3];
    for (size_t y = top; y < end; y++)
        for (size_t x = left; x < right; x++)
            for (size_t c = 0; c < channels; c++)
                room->image[(y * job->width + x) * channels + c] = (uint8_t)values[FILL_AT + c];
}

INLINE void run_step(const struct job *job, struct room *room, int code, const double *values, int fused)
{
    switch (code) {
    case NOTHING:
        return;
    case BRIGHTNESS:
    case POSTERIZE:
    case SOLARIZE:
    case SOLARIZE_ADD:
    case INVERT:
        make_table(room, code, values);
        add_tables(job, room, 1);
        return;
    case EQUALIZE:
        equalize(job, room);
        return;
    case AUTOCONTRAST:
        autocontrast(job, room);
        return;
    }
    if (job->channels == 1 && (code == SATURATION || code == HUE || code == GRAYSCALE))
        return;
    apply_tables(job, room);
    switch (code) {
    case CONTRAST:
        blend_with(room, (float)sum_of_gray(job, room, fused) / (float)(job->height * job->width), values[0]);
        add_tables(job, room, 1);
        break;
    case SATURATION:
        change_colors(job, room, SATURATION, values[0], fused);
        break;
    case HUE:
        change_colors(job, room, HUE, values[0], fused);
        break;
    case SHARPNESS:
        sharpen(job, room, values[0]);
        break;
    case GRAYSCALE:
        change_colors(job, room, GRAYSCALE, 0, fused);
        break;
    case BLUR:
        blur(job, room, values);
        break;
    case AFFINE:
    case PERSPECTIVE:
        warp(job, room, code, values);
        break;
    case MIRROR:
        mirror(job, room);
        break;
    case FLIP:
        flip(job, room);
        break;
    case ERASE:
        erase(job, room, values);
        break;
    }
}

INLINE int run_all(const struct job *job, int fused)
{
    struct room room;
    memset(&room, 0, sizeof room);
    size_t line = job->width * job->channels, n = job->height * line, done = 0;
    size_t reach = job->blur / 2 * job->channels;
    if ((room.spare = malloc(n)) && (room.thirds = malloc(2 * line * sizeof(uint16_t))) &&
        (room.counts = malloc(4 * job->channels * sizeof *room.counts)) &&
        (room.table = malloc(job->channels * sizeof *room.table)) &&
        (room.next = malloc(job->channels * sizeof *room.next)) &&
        (!job->blur || ((room.line = malloc((line + 2 * reach) * sizeof(float))) &&
                        (room.sum_line = malloc(line * sizeof(float))) &&
                        (room.ring = malloc(job->blur * line * sizeof(float))) &&
                        (room.weights = malloc(2 * job->blur * sizeof(float))))) &&
        (!job->warps || ((room.columns = malloc(job->width * sizeof(int64_t))) &&
                         (room.rows = malloc(job->width * sizeof(int64_t))) &&
                         (room.wide = malloc(job->height * job->width * 4 * sizeof(float)))))) {
        for (size_t i = 0; i < job->count; i++) {
            uint8_t *pixels = job->pixels + i * n;
            room.image = pixels;
            room.other = room.spare;
            for (size_t s = 0; s < job->steps; s++) {
                size_t at = s * job->count + i;
                run_step(job, &room, job->codes[at], job->values + at * job->places, fused);
            }
            apply_tables(job, &room);
            if (room.image != pixels)
                memcpy(pixels, room.image, n);
        }
        done = 1;
    }
    free(room.spare);
    free(room.line);
    free(room.sum_line);
    free(room.thirds);
    free(room.ring);
    free(room.weights);
    free(room.wide);
    free(room.columns);
    free(room.rows);
    free(room.counts);
    free(room.table);
    free(room.next);
    return (int)done;
}

#ifdef FOR_GENERATIONS
__attribute__((target("avx2,fma"))) static int run_on_newer(const struct job *job)
{
    return run_all(job, 1);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma"))) static int run_on_newest(const struct job *job)
{
    return run_all(job, 1);
}
#endif

static int run(const struct job *job)
{
#ifdef FOR_GENERATIONS
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return run_on_newest(job);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return run_on_newer(job);
    return run_all(job, 0);
#elif defined(__FMA__) || defined(__aarch64__)
    return run_all(job, 1);
#else
    return run_all(job, 0);
#endif
}

/* --- What may be asked for --- */

static int are_numbers(const double *values, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!(fabs(values[i]) <= LARGEST))
            return 0;
    return 1;
}

static int is_kernel(double size, double sigma, size_t limit)
{
    return size >= 1 && size < 2 * (double)limit && fmod(size, 2) == 1 && sigma > 0 && sigma <= LARGEST;
}

/* Returns what is wrong with a step, or nothing. */
static const char *wrong_with(struct job *job, int code, const double *values)
{
    static const uint8_t numbers[END] = {[BRIGHTNESS] = 1, [CONTRAST] = 1, [SATURATION] = 1,   [HUE] = 1,
                                         [SHARPNESS] = 1,  [POSTERIZE] = 1, [SOLARIZE] = 1,    [SOLARIZE_ADD] = 2,
                                         [BLUR] = 4,       [AFFINE] = 6,    [PERSPECTIVE] = 8, [ERASE] = 4};
    if (code >= END)
        return "an unknown code of an operation";
    if ((code == CONTRAST || code == SATURATION || code == HUE || code == GRAYSCALE) && job->channels != 1 &&
        job->channels != 3)
        return "an operation that needs one channel or three";
    if (!are_numbers(values, numbers[code]))
        return "a value that is no number, or too large";
    if (code == BLUR) {
        if (!is_kernel(values[0], values[2], job->width) || !is_kernel(values[1], values[3], job->height))
            return "a kernel of blur that is even, or too large for the images, or without a standard deviation";
        for (size_t i = 0; i < 2; i++)
            job->blur = job->blur < (size_t)values[i] ? (size_t)values[i] : job->blur;
    }
    if (code == ERASE) {
        for (size_t i = 0; i < 2; i++)
            if (!(values[i] >= 0 && values[2 + i] >= 0 &&
                  values[i] + values[2 + i] <= (double)(i ? job->width : job->height) && values[i] == floor(values[i]) &&
                  values[2 + i] == floor(values[2 + i])))
                return "a rectangle that is not inside the images";
        for (size_t c = 0; c < job->channels; c++)
            if (!(values[FILL_AT + c] >= 0 && values[FILL_AT + c] <= 255))
                return "a color that is not from 0 to 255";
    }
    if (code == AFFINE || code == PERSPECTIVE) {
        double sampling = values[SAMPLING_AT];
        if (!(sampling >= 0 && sampling < SAMPLINGS && sampling == floor(sampling)))
            return "an unknown number of an interpolation";
        for (size_t c = 0; c < job->channels; c++)
            if (fabs(values[FILL_AT + c]) > LARGEST) /* no number is no fill */
                return "a fill that is too large";
        job->warps = 1;
    }
    return NULL;
}

static const char *wrong_with_steps(struct job *job)
{
    for (size_t i = 0; i < job->count; i++)
        for (size_t s = 0; s < job->steps; s++) {
            size_t at = s * job->count + i;
            const char *wrong = wrong_with(job, job->codes[at], job->values + at * job->places);
            if (wrong)
                return wrong;
        }
    return NULL;
}

static PyObject *run_steps(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer pixels, codes, values;
    Py_ssize_t height, width, channels;
    if (!PyArg_ParseTuple(args, "w*y*y*nnn:run", &pixels, &codes, &values, &height, &width, &channels))
        return NULL;
    PyObject *result = NULL;
    const char *wrong = "the sizes of pixels, codes and values do not fit together";
    Py_ssize_t most = (Py_ssize_t)1 << 20;
    if (height >= 1 && width >= 1 && channels >= 1 && height <= most && width <= most && channels <= MOST_CHANNELS &&
        pixels.len % (height * width * channels) == 0) {
        Py_ssize_t count = pixels.len / (height * width * channels), places = FILL_AT + channels;
        Py_ssize_t steps = count ? codes.len / count : 0;
        if (codes.len == steps * count && values.len / (Py_ssize_t)sizeof(double) / places == codes.len &&
            values.len == codes.len * places * (Py_ssize_t)sizeof(double)) {
            /* Copies: another thread may change what it has given while the GIL is free. */
            struct job job = {pixels.buf,       NULL,           NULL,           (size_t)steps, (size_t)count,
                              (size_t)height,   (size_t)width,  (size_t)channels, (size_t)places, 0, 0};
            uint8_t *some = malloc((size_t)codes.len + 1);
            double *numbers = malloc((size_t)values.len + 1);
            if (!some || !numbers) {
                wrong = NULL;
                PyErr_NoMemory();
            } else {
                memcpy(some, codes.buf, (size_t)codes.len);
                memcpy(numbers, values.buf, (size_t)values.len);
                job.codes = some;
                job.values = numbers;
                if (!(wrong = wrong_with_steps(&job))) {
                    int done;
                    Py_BEGIN_ALLOW_THREADS
                    done = run(&job);
                    Py_END_ALLOW_THREADS
                    result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
                }
            }
            free(some);
            free(numbers);
        }
    }
    if (wrong)
        PyErr_SetString(PyExc_ValueError, wrong);
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&codes);
    PyBuffer_Release(&values);
    return result;
}

static PyMethodDef methods[] = {
    {"run", run_steps, METH_VARARGS,
     "run(pixels, codes, values, height, width, channels)\n\n"
     "Changes pixels, uint8 (B, H, W, C), in place by the steps of each picture: codes, uint8 (S, B), and values, float64\n"
     "(S, B, 9 + C). Raises ValueError for what shardio/augment/steps.py does not allow, before any pixel is changed."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pixels", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pixels(void)
{
    return PyModuleDef_Init(&definition);
}
