/* Boxes of pictures, resampled to one size and mirrored if need be: what shardio/augment/resample.py says, one picture after the
   other. The filters are separable. Lines of the picture are resampled along themselves, in floats, when the next line of
   the output needs them, so that no picture in between is ever in memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

/* The loops are left to the compiler, which makes them for two generations of processors. (Vectors of AVX-512 were slower.) */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

struct job {
    const uint8_t *pixels;  /* of the windows, one after the other */
    const int64_t *windows; /* of each picture the part that is there: its first row and column, height and width */
    const double *spans; /* of each, along its rows and then along its columns, in pixels of the picture: where the box
                            begins, how long it is, both not always whole, and the first and the end of what the filter
                            may see, which lies in the window */
    const uint8_t *flips;
    void *out; /* bytes; or floats, if there are factors */
    const float *factors, *offsets; /* of each channel */
    size_t count, most_height, most_width /* of a window */, channels, out_height, out_width;
    int cubic, antialias;
};

enum { TOP, LEFT, HEIGHT, WIDTH, NUM_SIDES };

/* What each of the outputs along one axis is made of: the inputs from `firsts` on, `count` of them, some with a weight of
   0, which may lie beyond the last. There is room for `most` weights of each. */
struct taps {
    size_t most, count, end;
    size_t *firsts;
    float *weights;
};

static inline __attribute__((always_inline)) float filter(int cubic, float a, float x)
{
    x = x < 0 ? -x : x;
    if (!cubic)
        return x < 1 ? 1 - x : 0;
    /* Keys, "Cubic convolution interpolation for digital image processing", 1981. */
    if (x < 1)
        return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? (((x - 5) * x + 8) * x - 4) * a : 0;
}

static inline long floor_of(double x)
{
    long whole = (long)x;
    return whole - (x < (double)whole);
}

static inline long clamp(long x, long least, long most)
{
    return x < least ? least : x > most ? most : x;
}

static double radius_of(const struct job *job, double scale)
{
    return (job->cubic ? 2 : 1) * (job->antialias && scale > 1 ? scale : 1);
}

/* As Pillow has it: the filter is as wide as what it shrinks, and what it may not see is left out. Without
   antialias it is as torch has it: the filter is as wide as when nothing shrinks, and the pixels at the edge go on. */
static inline __attribute__((always_inline)) void find_taps(struct taps *taps, const struct job *job, const double *span,
                                                            size_t size)
{
    double start = span[0], scale = span[1] / (double)size, radius = radius_of(job, scale);
    float shrink = (float)((job->cubic ? 2 : 1) / radius), a = job->antialias ? -0.5f : -0.75f;
    taps->count = 0;
    long low = (long)span[2], high = (long)span[3];
    for (size_t i = 0; i < size; i++) {
        double centre = start + ((double)i + 0.5) * scale;
        long first = floor_of(centre - radius + 0.5), last = floor_of(centre + radius + 0.5);
        long from = clamp(first, low, high - 1), to = clamp(last, from + 1, high);
        float *weights = taps->weights + i * taps->most, sum = 0;
        memset(weights, 0, taps->most * sizeof(float));
        if (job->antialias)
            first = from, last = to;
        for (long at = first; at < last; at++) {
            float weight = filter(job->cubic, a, (float)((double)at + 0.5 - centre) * shrink);
            weights[clamp(at, from, to - 1) - from] += weight;
            sum += weight;
        }
        if (sum == 0) /* a box of less than a pixel */
            weights[0] = sum = 1;
        for (long k = 0; k < to - from; k++)
            weights[k] /= sum;
        taps->firsts[i] = (size_t)from;
        taps->end = (size_t)to;
        if (taps->count < (size_t)(to - from))
            taps->count = (size_t)(to - from);
    }
}

static inline __attribute__((always_inline)) void to_floats(float *restrict to, const uint8_t *restrict from, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = (float)from[i];
}

static inline __attribute__((always_inline)) void add_line(float *restrict to, const float *restrict line, float weight,
                                                           size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] += weight * line[i];
}

static inline __attribute__((always_inline)) void to_bytes(uint8_t *restrict to, const float *restrict from, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int32_t value = (int32_t)from[i];
        value = value < 0 ? 0 : value;
        to[i] = (uint8_t)(value > 255 ? 255 : value);
    }
}

/* Whole grey levels, normalised. */
static inline __attribute__((always_inline)) void to_normal(float *restrict to, const float *restrict from,
                                                            const float *restrict factors,
                                                            const float *restrict offsets, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int32_t value = (int32_t)from[i];
        value = value < 0 ? 0 : value;
        to[i] = (float)(value > 255 ? 255 : value) * factors[i] + offsets[i];
    }
}

/* A line of the picture, resampled: `from` begins at pixel `left`. */
static inline __attribute__((always_inline)) void resample_line(float *restrict to, const float *restrict from,
                                                                const struct taps *taps, size_t count, size_t left,
                                                                size_t size, size_t channels, int flip)
{
    for (size_t x = 0; x < size; x++) {
        size_t at = flip ? size - 1 - x : x;
        const float *pixels = from + (taps->firsts[at] - left) * channels, *weights = taps->weights + at * taps->most;
#ifdef __SSE2__
        if (channels == 3) {
            /* Four floats at a time, of which the last is of the next pixel, and is overwritten by that. */
            __m128 sum = _mm_mul_ps(_mm_set1_ps(weights[0]), _mm_loadu_ps(pixels));
            for (size_t k = 1; k < count; k++)
                sum = _mm_add_ps(sum, _mm_mul_ps(_mm_set1_ps(weights[k]), _mm_loadu_ps(pixels + 3 * k)));
            _mm_storeu_ps(to + 3 * x, sum);
            continue;
        }
#endif
        for (size_t c = 0; c < channels; c++) {
            float sum = 0;
            for (size_t k = 0; k < count; k++)
                sum += weights[k] * pixels[k * channels + c];
            to[x * channels + c] = sum;
        }
    }
}

/* Memory of one thread. `factors` and `offsets` are of the values of a line. `lines` are the resampled lines of the picture that the next line of the output is made of: line
   number n is in place n modulo `most` of the rows. Lines have room for one float more than they need. */
struct room {
    struct taps rows, columns;
    float *pixels, *lines, *sums, *factors, *offsets;
};

/* `shown` are the pixels of the picture's window. */
FOR_EACH_PROCESSOR
static void resample_one(const struct job *job, size_t number, const uint8_t *shown, struct room *room)
{
    const double *spans = job->spans + 8 * number;
    const int64_t *window = job->windows + NUM_SIDES * number;
    size_t top = (size_t)window[TOP], first_column = (size_t)window[LEFT];
    size_t stride = (size_t)window[WIDTH] * job->channels, n = job->out_width * job->channels, most = room->rows.most;
    size_t at = number * job->out_height * n;
    struct taps *rows = &room->rows, *columns = &room->columns;
    float *pixels = room->pixels, *sums = room->sums;
    find_taps(rows, job, spans, job->out_height);
    find_taps(columns, job, spans + 4, job->out_width);
    size_t left = columns->firsts[0], made = rows->firsts[0], wide = (columns->end - left) * job->channels;
    for (size_t y = 0; y < job->out_height; y++, at += n) {
        const float *weights = rows->weights + y * most;
        size_t first = rows->firsts[y];
        if (made < first) /* without antialias, lines between those that are wanted are not */
            made = first;
        size_t end = first + rows->count < rows->end ? first + rows->count : rows->end;
        for (; made < end; made++) {
            float *line = room->lines + made % most * (n + 1);
            to_floats(pixels, shown + (made - top) * stride + (left - first_column) * job->channels, wide);
#define RESAMPLE_LINE(COUNT)                                                                                           \
    resample_line(line, pixels, columns, COUNT, left, job->out_width, job->channels, job->flips[number])
            if (columns->count == 2)
                RESAMPLE_LINE(2);
            else if (columns->count == 3)
                RESAMPLE_LINE(3);
            else if (columns->count == 4)
                RESAMPLE_LINE(4);
            else
                RESAMPLE_LINE(columns->count);
        }
        for (size_t i = 0; i < n; i++)
            sums[i] = 0.5f;
        for (size_t k = 0; k < end - first; k++)
            add_line(sums, room->lines + (first + k) % most * (n + 1), weights[k], n);
        if (job->factors)
            to_normal((float *)job->out + at, sums, room->factors, room->offsets, n);
        else
            to_bytes((uint8_t *)job->out + at, sums, n);
    }
}

static int make_taps(struct taps *taps, const struct job *job, size_t size, size_t limit)
{
    taps->most = 2 * (size_t)ceil(radius_of(job, (double)limit / (double)size)) + 2;
    taps->firsts = malloc(size * sizeof(size_t));
    taps->weights = malloc(size * taps->most * sizeof(float));
    return taps->firsts && taps->weights;
}

static void free_taps(struct taps *taps)
{
    free(taps->firsts);
    free(taps->weights);
}

static int run(const struct job *job)
{
    struct room room;
    memset(&room, 0, sizeof room);
    size_t n = job->out_width * job->channels;
    int done = make_taps(&room.rows, job, job->out_height, job->most_height) &&
               make_taps(&room.columns, job, job->out_width, job->most_width) &&
               /* What is read beyond the last pixel has no weight. */
               (room.pixels = calloc((job->most_width + room.columns.most) * job->channels + 1, sizeof(float))) &&
               (room.lines = malloc(room.rows.most * (n + 1) * sizeof(float))) &&
               (room.sums = malloc(n * sizeof(float))) && (room.factors = malloc(n * sizeof(float))) &&
               (room.offsets = malloc(n * sizeof(float)));
    for (size_t i = 0; done && job->factors && i < n; i++) {
        room.factors[i] = job->factors[i % job->channels];
        room.offsets[i] = job->offsets[i % job->channels];
    }
    const uint8_t *shown = job->pixels;
    for (size_t i = 0; done && i < job->count; i++) {
        resample_one(job, i, shown, &room);
        const int64_t *window = job->windows + NUM_SIDES * i;
        shown += (size_t)window[HEIGHT] * (size_t)window[WIDTH] * job->channels;
    }
    free_taps(&room.rows);
    free_taps(&room.columns);
    free(room.pixels);
    free(room.lines);
    free(room.sums);
    free(room.factors);
    free(room.offsets);
    return done;
}

static int is_inside(const double *span, int64_t start, int64_t side)
{
    double first = span[2], end = span[3], slack = 1e-6;
    return first >= (double)start && end >= first + 1 && end <= (double)(start + side) && first == floor(first) &&
           end == floor(end) && span[1] > 0 && span[0] >= first - slack && span[0] + span[1] <= end + slack;
}

/* Whether all boxes lie in what may be seen, and that in their windows. Comparisons with what is no number are false. */
static int inside(const struct job *job)
{
    for (size_t i = 0; i < job->count; i++) {
        const double *spans = job->spans + 8 * i;
        const int64_t *window = job->windows + NUM_SIDES * i;
        if (!is_inside(spans, window[TOP], window[HEIGHT]) || !is_inside(spans + 4, window[LEFT], window[WIDTH]))
            return 0;
    }
    return 1;
}

/* Whether the windows have places and sizes that make sense, and together as many bytes as there are. Sets the most. */
static int fits(struct job *job, size_t nbytes)
{
    const int64_t most = (int64_t)1 << 20;
    for (size_t i = 0; i < job->count; i++) {
        const int64_t *window = job->windows + NUM_SIDES * i;
        for (int side = 0; side < NUM_SIDES; side++)
            if (window[side] < (side == TOP || side == LEFT ? 0 : 1) || window[side] > most)
                return 0;
        size_t height = (size_t)window[HEIGHT], width = (size_t)window[WIDTH];
        if (height * width * job->channels > nbytes)
            return 0;
        nbytes -= height * width * job->channels;
        job->most_height = height > job->most_height ? height : job->most_height;
        job->most_width = width > job->most_width ? width : job->most_width;
    }
    return !nbytes;
}

static PyObject *resample(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer pixels, windows, spans, flips, out, affine;
    Py_ssize_t channels, out_height, out_width;
    int cubic, antialias;
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*y*nnnpp:resample", &pixels, &windows, &spans, &flips, &out, &affine,
                          &channels, &out_height, &out_width, &cubic, &antialias))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t most = (Py_ssize_t)1 << 20, count = flips.len;
    const float *factors = affine.len ? affine.buf : NULL;
    struct job job = {pixels.buf,    windows.buf, spans.buf, flips.buf,        out.buf,            factors,
                      NULL,          (size_t)count, 1,       1,                (size_t)channels,   (size_t)out_height,
                      (size_t)out_width, cubic,   antialias};
    Py_ssize_t depth = factors ? sizeof(float) : 1;
    if (channels < 1 || out_height < 1 || out_width < 1 || channels > 64 || out_height > most || out_width > most ||
        spans.len != 64 * count || windows.len != 8 * NUM_SIDES * count || !fits(&job, (size_t)pixels.len) ||
        out.len / depth / channels / out_width / out_height != count ||
        out.len != count * out_height * out_width * channels * depth ||
        (factors && affine.len != 2 * channels * (Py_ssize_t)sizeof(float))) {
        PyErr_SetString(PyExc_ValueError, "sizes that do not fit together");
    } else if (!inside(&job)) {
        PyErr_SetString(PyExc_IndexError, "a box that is not inside its window");
    } else {
        int done;
        job.offsets = factors ? factors + channels : NULL;
        Py_BEGIN_ALLOW_THREADS
        done = run(&job);
        Py_END_ALLOW_THREADS
        result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&windows);
    PyBuffer_Release(&spans);
    PyBuffer_Release(&flips);
    PyBuffer_Release(&out);
    PyBuffer_Release(&affine);
    return result;
}

static PyMethodDef methods[] = {
    {"resample", resample, METH_VARARGS,
     "resample(pixels, windows, spans, flips, out, affine, channels, out_height, out_width, cubic, antialias)\n\n"
     "out = the box of each picture, resampled, and mirrored where its flip is not 0. Of each, `pixels` has a window.\n"
     "affine is empty, and out is bytes; or it is a factor for each channel and then what is added to each, and out is\n"
     "floats."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_resample", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__resample(void)
{
    return PyModuleDef_Init(&definition);
}
