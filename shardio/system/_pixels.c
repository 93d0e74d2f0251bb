/* The steps of a batch: what shardio/augment/pixels_torch.py defines by operations of torch, one picture after the other,
   so that a picture stays in the processor's cache until its last step. Operations that replace grey levels by others are
   tables, which are composed until an operation comes that is none. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The loops are left to the compiler, which makes all of it for two generations of processors: `run` below. Products are
   rounded before they are added, as torch's operations do it one by one, unless it is said otherwise. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_TWO_GENERATIONS
#include <immintrin.h>
#pragma GCC optimize("O3", "no-trapping-math", "no-math-errno", "fp-contract=off")
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
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
    ADD,
    BLUR,
    AFFINE,
    PERSPECTIVE,
    MIRROR,
    FLIP,
    KEEP,
    COLLECT,
    RECALL,
    TAKE,
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
    int keeps, warps;
};

/* Memory of one thread. The picture is in `image`, `other` is as large; each operation may exchange them. */
struct room {
    uint8_t *image, *other, *spare, *kept;
    float *sum;             /* of weighted pictures */
    float *line, *grey;     /* a line of the picture in floats, with room on both sides for blur; grey of a line */
    float *sum_line;
    float *planes[3];       /* the channels of a line */
    uint16_t *thirds;       /* sums of three lines */
    float *ring, *weights;  /* blurred lines, number n in place n modulo the kernel's height; weights of both axes */
    int64_t *columns, *rows;
    uint32_t (*counts)[256]; /* four of each channel */
    uint8_t (*table)[256], (*next)[256];
    int tables, same; /* whether `table` waits to be applied; whether it is the first channel's for all of them */
};

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

#ifdef FOR_TWO_GENERATIONS
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
#ifdef FOR_TWO_GENERATIONS
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
        /* Neighbours are often alike, and a count has to be written before it can be read again. */
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

static void add_numbers(const struct job *job, struct room *room, const double *values)
{
    int same = 1;
    for (size_t c = 0; c < job->channels; c++) {
        same = same && values[c] == values[0];
        for (size_t i = 0; i < 256; i++)
            room->next[c][i] = level_of(rint((double)i + values[c]));
    }
    add_tables(job, room, same);
}

/* --- Colours: pictures of three channels --- */

/* `fused`: as torch, which adds a product before it is rounded where the processor can, so that all bits are the same. */
INLINE float add_product(float sum, float x, float y, int fused)
{
    return fused ? __builtin_fmaf(x, y, sum) : sum + x * y;
}

INLINE void grey_of_line(float *restrict grey, const uint8_t *restrict pixels, size_t n, int fused)
{
    for (size_t i = 0; i < n; i++) {
        float red = pixels[3 * i], green = pixels[3 * i + 1], blue = pixels[3 * i + 2];
        /* Whole grey levels; what is below 2^31 and not negative is cut down as by floor. */
        grey[i] = (float)(int32_t)add_product(add_product(red * 0.2989f, green, 0.587f, fused), blue, 0.114f, fused);
    }
}

INLINE uint64_t sum_of_grey(const struct job *job, struct room *room, int fused)
{
    uint64_t sum = 0;
    size_t width = job->width, n = job->height * width;
    if (job->channels == 1) {
        for (size_t i = 0; i < n; i++)
            sum += room->image[i];
        return sum;
    }
    for (size_t y = 0; y < job->height; y++) {
        uint32_t part = 0; /* of at most 2^20 pixels */
        grey_of_line(room->grey, room->image + y * width * 3, width, fused);
        for (size_t x = 0; x < width; x++)
            part += (uint32_t)(int32_t)room->grey[x];
        sum += part;
    }
    return sum;
}

INLINE void saturate(const struct job *job, struct room *room, double factor, int fused)
{
    float share = (float)factor, rest = (float)(1.0 - factor);
    size_t width = job->width;
    for (size_t y = 0; y < job->height; y++) {
        uint8_t *restrict at = room->image + y * width * 3;
        float *restrict grey = room->grey;
        grey_of_line(grey, at, width, fused);
        for (size_t x = 0; x < width; x++) {
            float other = grey[x] * rest;
            at[3 * x] = to_byte((float)at[3 * x] * share + other);
            at[3 * x + 1] = to_byte((float)at[3 * x + 1] * share + other);
            at[3 * x + 2] = to_byte((float)at[3 * x + 2] * share + other);
        }
    }
}

INLINE void make_grey(const struct job *job, struct room *room, int fused)
{
    size_t width = job->width;
    for (size_t y = 0; y < job->height; y++) {
        uint8_t *restrict at = room->image + y * width * 3;
        const float *restrict grey = room->grey;
        grey_of_line(room->grey, at, width, fused);
        for (size_t x = 0; x < width; x++)
            at[3 * x] = at[3 * x + 1] = at[3 * x + 2] = (uint8_t)(int32_t)grey[x];
    }
}

INLINE float channel_of(float phase, float hue, float most, float chroma)
{
    float place = phase + hue * 6;
    place = place >= 6 ? place - 6 : place;
    float far = 4 - place;
    place = place < far ? place : far;
    place = place > 0 ? place : 0;
    return most - chroma * (place < 1 ? place : 1);
}

INLINE void turn_hue(const struct job *job, struct room *room, double turn)
{
    size_t width = job->width;
    float *restrict reds = room->planes[0], *restrict greens = room->planes[1], *restrict blues = room->planes[2];
    float by = (float)turn;
    for (size_t y = 0; y < job->height; y++) {
        uint8_t *restrict at = room->image + y * width * 3;
        for (size_t x = 0; x < width; x++) {
            reds[x] = (float)at[3 * x] / 255;
            greens[x] = (float)at[3 * x + 1] / 255;
            blues[x] = (float)at[3 * x + 2] / 255;
        }
        for (size_t x = 0; x < width; x++) {
            float red = reds[x], green = greens[x], blue = blues[x];
            float most = red > green ? red : green, least = red < green ? red : green;
            most = most > blue ? most : blue;
            least = least < blue ? least : blue;
            float chroma = most - least;
            int is_red = most == red, is_green = most == green;
            float from = is_red ? green - blue : is_green ? blue - red : red - green;
            float sixths = (is_red ? 0.0f : is_green ? 2.0f : 4.0f) + from / (chroma > 0 ? chroma : 1);
            float hue = sixths / 6 + by;
            /* `turn` is at most LARGEST: whole numbers are left alone, which need not fit into an int. */
            hue -= floorf(hue);
            reds[x] = channel_of(5, hue, most, chroma);
            greens[x] = channel_of(3, hue, most, chroma);
            blues[x] = channel_of(1, hue, most, chroma);
        }
        for (size_t x = 0; x < width; x++) {
            at[3 * x] = to_byte(reds[x] * 255.999f);
            at[3 * x + 1] = to_byte(greens[x] * 255.999f);
            at[3 * x + 2] = to_byte(blues[x] * 255.999f);
        }
    }
}

/* --- Neighbours --- */

static void exchange(struct room *room)
{
    uint8_t *image = room->image;
    room->image = room->other;
    room->other = image;
}

INLINE void sharpen_line(uint8_t *restrict to, const uint8_t *restrict above, const uint8_t *restrict at,
                         const uint8_t *restrict below, uint16_t *restrict thirds, float rest, size_t channels, size_t n)
{
    for (size_t i = 0; i < n; i++)
        thirds[i] = (uint16_t)(above[i] + at[i] + below[i]);
    for (size_t i = channels; i < n - channels; i++) {
        /* A thirteenth of the eight neighbours and of five times the pixel, rounded: never half-way between two. */
        uint32_t sum = (uint32_t)thirds[i - channels] + thirds[i] + thirds[i + channels] + 4u * at[i];
        float smooth = (float)(int32_t)((sum + 6) * 5042 >> 16), pixel = at[i];
        to[i] = to_byte(pixel + (smooth - pixel) * rest);
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
        sharpen_line(to, at - n, at, at + n, room->thirds, rest, channels, n);
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

INLINE int64_t place_of(double place)
{
    place = place == place ? place : FAR_OUT;
    place = place < -FAR_OUT ? -FAR_OUT : place;
    return (int64_t)rint((place < FAR_OUT ? place : FAR_OUT) * (double)ONE);
}

/* Where the pixels of line `y` are read. */
INLINE void find_places(const struct job *job, const struct room *room, const double *values, const struct affine *map,
                        size_t y)
{
    int64_t *restrict columns = room->columns, *restrict rows = room->rows;
    if (map) {
        int64_t u = map->b * (int64_t)y + map->c, v = map->e * (int64_t)y + map->f;
        for (size_t x = 0; x < job->width; x++) {
            columns[x] = u + map->a * (int64_t)x;
            rows[x] = v + map->d * (int64_t)x;
        }
        return;
    }
    double down = (double)y + 0.5;
    for (size_t x = 0; x < job->width; x++) {
        double across = (double)x + 0.5, depth = values[6] * across + values[7] * down + 1.0;
        columns[x] = place_of((values[0] * across + values[1] * down + values[2]) / depth);
        rows[x] = place_of((values[3] * across + values[4] * down + values[5]) / depth);
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
/* A pixel of three channels in floats: no byte is read that is not before `end`. */
INLINE __m128 floats_of(const uint8_t *at, const uint8_t *end)
{
    int32_t bytes;
    if (at + 4 <= end)
        memcpy(&bytes, at, 4);
    else
        bytes = at[0] | at[1] << 8 | at[2] << 16;
    __m128i zero = _mm_setzero_si128(), wide = _mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), zero);
    return _mm_cvtepi32_ps(_mm_unpacklo_epi16(wide, zero));
}

/* Whole numbers are cut down to grey levels. */
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
    float right = fraction_of(u -= HALF), low = fraction_of(v -= HALF);
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

INLINE void bilinear_line(const struct job *job, const struct room *room, uint8_t *to, const float *fill)
{
    size_t channels = job->channels, width = job->width;
    const uint8_t *image = room->image;
#ifdef __SSE2__
    const uint8_t *stop = image + job->height * width * 3;
    __m128 fills = _mm_setzero_ps(), filled = fills;
    if (channels == 3) {
        __m128 given = _mm_set_ps(0, fill[2], fill[1], fill[0]);
        filled = _mm_cmpeq_ps(given, given);
        fills = _mm_and_ps(filled, given);
    }
#endif
    for (size_t x = 0; x < width; x++, to += channels) {
        int64_t u = room->columns[x], v = room->rows[x];
#ifdef __SSE2__
        int64_t column = (u - HALF) >> 32, row = (v - HALF) >> 32;
        if (channels == 3 && is_inside(column, width - 1) && is_inside(row, job->height - 1)) {
            float right = fraction_of(u - HALF), low = fraction_of(v - HALF), left = 1 - right, high = 1 - low;
            float a = high * left, b = high * right, c = low * left, d = low * right;
            const uint8_t *at = image + ((size_t)row * width + (size_t)column) * 3, *under = at + 3 * width;
            __m128 total = _mm_mul_ps(floats_of(at, stop), _mm_set1_ps(a));
            total = _mm_add_ps(total, _mm_mul_ps(floats_of(at + 3, stop), _mm_set1_ps(b)));
            total = _mm_add_ps(total, _mm_mul_ps(floats_of(under, stop), _mm_set1_ps(c)));
            total = _mm_add_ps(total, _mm_mul_ps(floats_of(under + 3, stop), _mm_set1_ps(d)));
            __m128 full = _mm_add_ps(_mm_mul_ps(_mm_sub_ps(total, fills), _mm_set1_ps(a + b + c + d)), fills);
            total = _mm_or_ps(_mm_and_ps(filled, full), _mm_andnot_ps(filled, total));
            store_levels(to, _mm_cvtps_epi32(total));
            continue;
        }
#endif
        if (!is_inside((u - HALF) >> 32, width) && !is_inside(((u - HALF) >> 32) + 1, width)) {
            for (size_t c = 0; c < channels; c++)
                to[c] = rounded(fill[c]);
            continue;
        }
        read_bilinear(job, image, to, u, v, fill, channels);
    }
}

INLINE void find_cubic(float *w, float d)
{
    /* Keys, "Cubic convolution interpolation for digital image processing", 1981, with a = -1. */
    w[0] = d * (-1 + d * (2 - d));
    w[1] = 1 + d * d * (d - 2);
    w[2] = d * (1 + d * (1 - d));
    w[3] = d * d * (d - 1);
}

/* As Pillow has it: `taps` pixels along each axis, of which those at the edge go on outside. */
INLINE void pillow_line_of(const struct job *job, const struct room *room, uint8_t *to, const uint8_t *fill, int taps,
                           size_t channels)
{
    size_t width = job->width, height = job->height;
    const uint8_t *image = room->image;
#ifdef __SSE2__
    const uint8_t *stop = image + height * width * channels;
#endif
    for (size_t x = 0; x < width; x++, to += channels) {
        int64_t u = room->columns[x], v = room->rows[x];
        if (!is_inside(u >> 32, width) || !is_inside(v >> 32, height)) {
            for (size_t c = 0; c < channels; c++)
                to[c] = fill[c];
            continue;
        }
        float right = fraction_of(u -= HALF), low = fraction_of(v -= HALF), across[4] = {1 - right, right},
              along[4] = {1 - low, low};
        int64_t column = u >> 32, row = v >> 32;
        if (taps == 4) {
            find_cubic(across, right);
            find_cubic(along, low);
            column--;
            row--;
        }
        size_t columns[4];
        const uint8_t *lines[4];
        for (int k = 0; k < taps; k++) {
            columns[k] = (size_t)inner(column + k, width) * channels;
            lines[k] = image + (size_t)inner(row + k, height) * width * channels;
        }
#ifdef __SSE2__
        if (channels == 3) {
            __m128 total = _mm_setzero_ps();
            for (int j = 0; j < taps; j++) {
                __m128 line = _mm_setzero_ps();
                for (int i = 0; i < taps; i++)
                    line = _mm_add_ps(line, _mm_mul_ps(floats_of(lines[j] + columns[i], stop), _mm_set1_ps(across[i])));
                total = _mm_add_ps(total, _mm_mul_ps(line, _mm_set1_ps(along[j])));
            }
            store_levels(to, _mm_cvttps_epi32(total));
            continue;
        }
#endif
        for (size_t c = 0; c < channels; c++) {
            float total = 0;
            for (int j = 0; j < taps; j++) {
                float line = 0;
                for (int i = 0; i < taps; i++)
                    line += (float)lines[j][columns[i] + c] * across[i];
                total += line * along[j];
            }
            to[c] = to_byte(total);
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

INLINE void nearest_line(const struct job *job, const struct room *room, uint8_t *to, const uint8_t *fill)
{
    size_t channels = job->channels;
    for (size_t x = 0; x < job->width; x++, to += channels) {
        int64_t column = room->columns[x] >> 32, row = room->rows[x] >> 32;
        int inside = is_inside(column, job->width) && is_inside(row, job->height);
        const uint8_t *from =
            inside ? room->image + ((size_t)row * job->width + (size_t)column) * channels : fill;
        for (size_t c = 0; c < channels; c++)
            to[c] = from[c];
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
    for (size_t y = 0; y < job->height; y++) {
        uint8_t *to = room->other + y * job->width * job->channels;
        find_places(job, room, values, code == AFFINE ? &map : NULL, y);
        if (sampling == NEAREST)
            nearest_line(job, room, to, levels);
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

/* --- Sums of several chains --- */

INLINE void collect(float *restrict sum, const uint8_t *restrict image, float weight, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += (float)image[i] * weight;
}

INLINE void take(uint8_t *restrict image, const float *restrict sum, size_t n)
{
    for (size_t i = 0; i < n; i++)
        image[i] = to_byte(sum[i]);
}

INLINE void run_step(const struct job *job, struct room *room, int code, const double *values, int fused)
{
    size_t n = job->height * job->width * job->channels;
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
    case ADD:
        add_numbers(job, room, values);
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
        blend_with(room, (float)sum_of_grey(job, room, fused) / (float)(job->height * job->width), values[0]);
        add_tables(job, room, 1);
        break;
    case SATURATION:
        saturate(job, room, values[0], fused);
        break;
    case HUE:
        turn_hue(job, room, values[0]);
        break;
    case SHARPNESS:
        sharpen(job, room, values[0]);
        break;
    case GRAYSCALE:
        make_grey(job, room, fused);
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
    case KEEP:
        memcpy(room->kept, room->image, n);
        memset(room->sum, 0, n * sizeof *room->sum);
        break;
    case COLLECT:
        collect(room->sum, room->image, (float)values[0], n);
        break;
    case RECALL:
        memcpy(room->image, room->kept, n);
        break;
    case TAKE:
        take(room->image, room->sum, n);
        break;
    }
}

INLINE int run_all(const struct job *job, int fused)
{
    struct room room;
    memset(&room, 0, sizeof room);
    size_t line = job->width * job->channels, n = job->height * line, done = 0;
    size_t reach = job->blur / 2 * job->channels;
    if ((room.spare = malloc(n)) && (room.grey = malloc(job->width * sizeof(float))) &&
        (room.planes[0] = malloc(job->width * sizeof(float))) &&
        (room.planes[1] = malloc(job->width * sizeof(float))) &&
        (room.planes[2] = malloc(job->width * sizeof(float))) && (room.thirds = malloc(line * sizeof(uint16_t))) &&
        (room.counts = malloc(4 * job->channels * sizeof *room.counts)) &&
        (room.table = malloc(job->channels * sizeof *room.table)) &&
        (room.next = malloc(job->channels * sizeof *room.next)) &&
        (!job->blur || ((room.line = malloc((line + 2 * reach) * sizeof(float))) &&
                        (room.sum_line = malloc(line * sizeof(float))) &&
                        (room.ring = malloc(job->blur * line * sizeof(float))) &&
                        (room.weights = malloc(2 * job->blur * sizeof(float))))) &&
        (!job->warps || ((room.columns = malloc(job->width * sizeof(int64_t))) &&
                         (room.rows = malloc(job->width * sizeof(int64_t))))) &&
        (!job->keeps || ((room.kept = malloc(n)) && (room.sum = malloc(n * sizeof(float)))))) {
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
    free(room.kept);
    free(room.sum);
    free(room.line);
    free(room.sum_line);
    free(room.grey);
    for (size_t c = 0; c < 3; c++)
        free(room.planes[c]);
    free(room.thirds);
    free(room.ring);
    free(room.weights);
    free(room.columns);
    free(room.rows);
    free(room.counts);
    free(room.table);
    free(room.next);
    return (int)done;
}

#ifdef FOR_TWO_GENERATIONS
__attribute__((target("avx2,fma"))) static int run_on_newer(const struct job *job)
{
    return run_all(job, 1);
}
#endif

static int run(const struct job *job)
{
#ifdef FOR_TWO_GENERATIONS
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
                                         [BLUR] = 4,       [AFFINE] = 6,    [PERSPECTIVE] = 8, [COLLECT] = 1};
    if (code >= END)
        return "an unknown code of an operation";
    if ((code == CONTRAST || code == SATURATION || code == HUE || code == GRAYSCALE) && job->channels != 1 &&
        job->channels != 3)
        return "an operation that needs one channel or three";
    if (!are_numbers(values, code == ADD ? job->channels : numbers[code]))
        return "a value that is no number, or too large";
    if (code == BLUR) {
        if (!is_kernel(values[0], values[2], job->width) || !is_kernel(values[1], values[3], job->height))
            return "a kernel of blur that is even, or too large for the pictures, or without a standard deviation";
        for (size_t i = 0; i < 2; i++)
            job->blur = job->blur < (size_t)values[i] ? (size_t)values[i] : job->blur;
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
        for (size_t s = 0, kept = 0; s < job->steps; s++) {
            size_t at = s * job->count + i;
            int code = job->codes[at];
            const char *wrong = wrong_with(job, code, job->values + at * job->places);
            if (wrong)
                return wrong;
            if (code == KEEP)
                kept = 1, job->keeps = 1;
            if ((code == COLLECT || code == RECALL || code == TAKE) && !kept)
                return "a picture is asked for that was not kept";
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
    const char *wrong = "sizes that do not fit together";
    Py_ssize_t most = (Py_ssize_t)1 << 20;
    if (height >= 1 && width >= 1 && channels >= 1 && height <= most && width <= most && channels <= MOST_CHANNELS &&
        pixels.len % (height * width * channels) == 0) {
        Py_ssize_t count = pixels.len / (height * width * channels), places = FILL_AT + channels;
        Py_ssize_t steps = count ? codes.len / count : 0;
        if (codes.len == steps * count && values.len / (Py_ssize_t)sizeof(double) / places == codes.len &&
            values.len == codes.len * places * (Py_ssize_t)sizeof(double)) {
            /* Copies: another thread may change what it has given while the GIL is free. */
            struct job job = {pixels.buf,       NULL,           NULL,           (size_t)steps, (size_t)count,
                              (size_t)height,   (size_t)width,  (size_t)channels, (size_t)places, 0, 0, 0};
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
