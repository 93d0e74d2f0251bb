/* A picture resized, and cut or framed to the size of a sample: what shardio/conversion/images/fit.py says, to the bit as
   torch's antialiased kernel for bytes does it. Along the rows first: each output is a sum of pixels times weights of 16
   bits, rounded to a byte; then along the columns in the same way. Only rows and columns of the sample are computed. Rows
   are resized when the next row of the sample needs them, so that no picture in between is ever in memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Vectors are spelled out: compilers find none along rows of three channels. Elsewhere torch has vectors of its own. */
#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#define HAVE_X86 1
#include <immintrin.h>
#endif

#define CHANNELS 3
/* Rows that are resized at once. */
#define ROWS 4
/* What a load may reach beyond the bytes that are wanted, and a store beyond a line. */
#define SLACK 32
#define MOST_SIDE ((Py_ssize_t)1 << 20)

struct job {
    const uint8_t *pixels;
    uint8_t *out;
    Py_ssize_t height, width, out_height, out_width, resized_height, resized_width, top, left;
    double row_scale, column_scale; /* rows and columns of the picture for each of the resized one */
    int cubic;
};

/* One side of the resized picture, as far as the sample shows it: `kept` rows or columns of it, the first of which is
   number `start` in the sample. Each is made of `count` pixels from its `firsts` on, an even number. Those that it has no use
   for, which may lie beyond the picture, have a weight of 0. There is room for `most` weights of each. */
struct side {
    size_t kept, start, count, most, *firsts;
    int same; /* as many as the picture has: nothing is resampled */
    int precision;
    int16_t *weights;
};

#ifdef HAVE_X86

static inline double filter(int cubic, double x)
{
    const double a = -0.5;
    x = fabs(x);
    if (!cubic)
        return x < 1 ? 1 - x : 0;
    /* Keys, "Cubic convolution interpolation for digital image processing", 1981; the operations in torch's order. */
    double near = ((a + 2) * x - (a + 3)) * x * x + 1, far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
    return x < 1 ? near : x < 2 ? far : 0;
}

/* The weights of output number i, in doubles, and where they begin. Returns the largest. */
static inline __attribute__((always_inline)) double weigh(double *weights, size_t most, size_t *first, size_t *used,
                                                          size_t length, double scale, double radius, double shrink,
                                                          size_t i, int cubic)
{
    double centre = scale * ((double)i + 0.5), total = 0, largest = 0;
    int64_t from = (int64_t)(centre - radius + 0.5), to = (int64_t)(centre + radius + 0.5);
    from = from < 0 ? 0 : from >= (int64_t)length ? (int64_t)length - 1 : from;
    to = to > (int64_t)length ? (int64_t)length : to;
    size_t count = to > from ? (size_t)(to - from) : 0;
    count = count > most ? most : count;
    *first = (size_t)from;
    *used = count;
    for (size_t k = 0; k < count; k++)
        weights[k] = filter(cubic, ((double)(from + (int64_t)k) - centre + 0.5) * shrink);
    for (size_t k = 0; k < count; k++)
        total += weights[k];
    for (size_t k = 0; k < count; k++) {
        weights[k] = total != 0 ? weights[k] / total : 0;
        largest = weights[k] > largest ? weights[k] : largest;
    }
    for (size_t k = count; k < most; k++)
        weights[k] = 0;
    return largest;
}

/* All outputs decide together how many bits a weight has, so all are weighed, those outside of the sample too. */
__attribute__((target("avx2"))) static int find_weights(struct side *side, size_t length, size_t resized, size_t from,
                                                        double scale, int cubic)
{
    double widened = scale >= 1 ? scale : 1, radius = (cubic ? 2 : 1) * widened, shrink = 1 / widened, largest = 0;
    size_t most = 2 * (size_t)ceil(radius) + 1, first, used;
    side->most = ((most < length ? most : length) + 1) / 2 * 2;
    /* One more for the weights of outputs outside of the sample. */
    double *weights = malloc((side->kept + 1) * side->most * sizeof(double));
    side->firsts = malloc(side->kept * sizeof(size_t));
    side->weights = malloc(side->kept * side->most * sizeof(int16_t));
    if (!weights || !side->firsts || !side->weights) {
        free(weights);
        return 0;
    }
    for (size_t i = 0; i < resized; i++) {
        size_t at = i - from, place = at < side->kept ? at : side->kept;
        double found = weigh(weights + place * side->most, side->most, &first, &used, length, scale, radius, shrink, i,
                             cubic);
        largest = found > largest ? found : largest;
        if (at < side->kept) {
            side->firsts[at] = first;
            side->count = used > side->count ? used : side->count;
        }
    }
    side->count = (side->count + 1) / 2 * 2;
    side->precision = 0;
    while (side->precision < 22 && 0.5 + largest * (double)(1 << (side->precision + 1)) < 1 << 15)
        side->precision++;
    double unit = (double)(1 << side->precision);
    for (size_t i = 0; i < side->kept * side->most; i++)
        side->weights[i] = (int16_t)(weights[i] < 0 ? weights[i] * unit - 0.5 : weights[i] * unit + 0.5);
    free(weights);
    return 1;
}

/* A line of each of ROWS rows of the picture. A store writes one byte more than a pixel has. */
__attribute__((target("avx2"))) static inline __attribute__((always_inline)) void
resize_rows(uint8_t *const *to, const uint8_t *const *from, const struct side *columns, size_t count)
{
    /* Of four pixels the first two and the last two, as numbers of 16 bits, each channel's beside each other. */
    const __m256i low = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1, 0, -1, 3, -1, 1, -1, 4,
                                         -1, 2, -1, 5, -1, -1, -1, -1, -1);
    const __m256i high = _mm256_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1, 6, -1, 9, -1, 7, -1,
                                          10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    const __m256i half = _mm256_set1_epi32(1 << columns->precision >> 1);
    const __m128i precision = _mm_cvtsi32_si128(columns->precision);
    /* All of it in registers: what is stored might be anything, to the compiler. */
    const uint8_t *from0 = from[0], *from1 = from[1], *from2 = from[2], *from3 = from[3];
    uint8_t *to0 = to[0], *to1 = to[1], *to2 = to[2], *to3 = to[3];
    const size_t *firsts = columns->firsts, *end = firsts + columns->kept, most = columns->most;
    const int16_t *weights = columns->weights;
    for (; firsts < end; firsts++, weights += most) {
        size_t at = *firsts * CHANNELS;
        __m256i first = half, second = half;
#define LOAD(ROW) _mm_loadu_si128((const __m128i *)(ROW + at + k * CHANNELS))
#define LOAD_BOTH(ONE, OTHER) _mm256_inserti128_si256(_mm256_castsi128_si256(LOAD(ONE)), LOAD(OTHER), 1)
#define ADD(SUM, PIXELS, PART)                                                                                         \
    SUM = _mm256_add_epi32(SUM, _mm256_madd_epi16(_mm256_shuffle_epi8(PIXELS, PART), _mm256_set1_epi32(pair)))
#pragma GCC unroll 3
        for (size_t k = 0; k < count; k += 4) {
            int32_t pair;
            memcpy(&pair, weights + k, sizeof pair);
            __m256i even = LOAD_BOTH(from0, from1), odd = LOAD_BOTH(from2, from3);
            ADD(first, even, low);
            ADD(second, odd, low);
            if (k + 2 < count) {
                memcpy(&pair, weights + k + 2, sizeof pair);
                ADD(first, even, high);
                ADD(second, odd, high);
            }
        }
#undef LOAD
#undef LOAD_BOTH
#undef ADD
        __m256i sums = _mm256_packs_epi32(_mm256_sra_epi32(first, precision), _mm256_sra_epi32(second, precision));
        sums = _mm256_packus_epi16(sums, sums);
        int64_t pixels0 = _mm_cvtsi128_si64(_mm256_castsi256_si128(sums)), pixels2 = pixels0 >> 32;
        int64_t pixels1 = _mm_cvtsi128_si64(_mm256_extracti128_si256(sums, 1)), pixels3 = pixels1 >> 32;
        memcpy(to0, &pixels0, 4), to0 += CHANNELS;
        memcpy(to1, &pixels1, 4), to1 += CHANNELS;
        memcpy(to2, &pixels2, 4), to2 += CHANNELS;
        memcpy(to3, &pixels3, 4), to3 += CHANNELS;
    }
}

__attribute__((target("avx2"))) static void resize_some_rows(uint8_t *const *to, const uint8_t *const *from,
                                                             const struct side *columns)
{
    if (columns->count == 4)
        resize_rows(to, from, columns, 4);
    else if (columns->count == 6)
        resize_rows(to, from, columns, 6);
    else if (columns->count == 8)
        resize_rows(to, from, columns, 8);
    else
        resize_rows(to, from, columns, columns->count);
}

/* One row of the sample, of `count` lines. The number of lines is even. */
__attribute__((target("avx2"))) static void resize_columns(uint8_t *to, const uint8_t *const *lines,
                                                           const int16_t *weights, size_t count, int bits, size_t nbytes)
{
    const __m256i zero = _mm256_setzero_si256(), half = _mm256_set1_epi32(1 << bits >> 1);
    const __m128i precision = _mm_cvtsi32_si128(bits);
    for (size_t at = 0; at < nbytes; at += sizeof(__m256i)) {
        __m256i sums[4] = {half, half, half, half};
        for (size_t k = 0; k < count; k += 2) {
            int32_t pair;
            memcpy(&pair, weights + k, sizeof pair);
            __m256i weight = _mm256_set1_epi32(pair);
            __m256i one = _mm256_loadu_si256((const __m256i *)(lines[k] + at));
            __m256i other = _mm256_loadu_si256((const __m256i *)(lines[k + 1] + at));
            __m256i low = _mm256_unpacklo_epi8(one, other), high = _mm256_unpackhi_epi8(one, other);
#define ADD(SUM, HALVES) SUM = _mm256_add_epi32(SUM, _mm256_madd_epi16(HALVES, weight))
            ADD(sums[0], _mm256_unpacklo_epi8(low, zero));
            ADD(sums[1], _mm256_unpackhi_epi8(low, zero));
            ADD(sums[2], _mm256_unpacklo_epi8(high, zero));
            ADD(sums[3], _mm256_unpackhi_epi8(high, zero));
#undef ADD
        }
        for (int i = 0; i < 4; i++)
            sums[i] = _mm256_sra_epi32(sums[i], precision);
        __m256i found = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        if (at + sizeof found <= nbytes) {
            _mm256_storeu_si256((__m256i *)(to + at), found);
        } else {
            uint8_t rest[sizeof found];
            _mm256_storeu_si256((__m256i *)rest, found);
            memcpy(to + at, rest, nbytes - at);
        }
    }
}

/* Memory of one picture. `lines` are resized rows: that of row number n is in place n modulo `places`. */
struct room {
    struct side rows, columns;
    size_t places, line_nbytes;
    uint8_t *lines, *ends[ROWS]; /* the picture's last rows, behind which a load would leave its memory */
    const uint8_t **sources;
};

/* Lines number `row` and those that follow, ROWS of them. Those of number `end` and beyond are of no use. */
static void make_lines(const struct job *job, struct room *room, size_t row, size_t end)
{
    const struct side *columns = &room->columns;
    size_t stride = (size_t)job->width * CHANNELS, nbytes = (size_t)job->height * stride;
    size_t reach = columns->count * CHANNELS + SLACK;
    const uint8_t *from[ROWS];
    uint8_t *to[ROWS];
    for (size_t i = 0; i < ROWS; i++) {
        size_t number = row + i < end ? row + i : end - 1, at = number * stride;
        to[i] = room->lines + (row + i) % room->places * room->line_nbytes;
        from[i] = job->pixels + at;
        if (columns->same) {
            memcpy(to[i], from[i] + columns->firsts[0] * CHANNELS, columns->kept * CHANNELS);
        } else if (nbytes - at - stride < reach) {
            memcpy(room->ends[i], from[i], stride);
            from[i] = room->ends[i];
        }
    }
    if (!columns->same)
        resize_some_rows(to, from, columns);
}

static void fit_one(const struct job *job, struct room *room)
{
    const struct side *rows = &room->rows, *columns = &room->columns;
    size_t stride = (size_t)job->out_width * CHANNELS, nbytes = columns->kept * CHANNELS;
    size_t before = columns->start * CHANNELS, after = stride - before - nbytes;
    size_t made = rows->firsts[0], last = rows->firsts[rows->kept - 1] + rows->count;
    last = last < (size_t)job->height ? last : (size_t)job->height;
    memset(job->out, 0, rows->start * stride);
    uint8_t *to = job->out + rows->start * stride;
    for (size_t y = 0; y < rows->kept; y++, to += stride) {
        size_t first = rows->firsts[y], end = first + rows->count < last ? first + rows->count : last;
        for (; made < end; made += ROWS)
            make_lines(job, room, made, last);
        memset(to, 0, before);
        memset(to + before + nbytes, 0, after);
        for (size_t k = 0; k < rows->count; k++) {
            size_t number = first + k < end ? first + k : end - 1;
            room->sources[k] = room->lines + number % room->places * room->line_nbytes;
        }
        if (rows->same)
            memcpy(to + before, room->sources[0], nbytes);
        else
            resize_columns(to + before, room->sources, rows->weights + y * rows->most, rows->count, rows->precision, nbytes);
    }
    memset(to, 0, (size_t)(job->out + (size_t)job->out_height * stride - to));
}

/* How the sample's `size` rows or columns, from number `from` of the `resized` ones on, are made of the picture's. */
static int make_side(struct side *side, Py_ssize_t size, Py_ssize_t resized, Py_ssize_t from, Py_ssize_t length,
                     double scale, int cubic)
{
    Py_ssize_t first = from > 0 ? from : 0, end = from + size < resized ? from + size : resized;
    side->start = (size_t)(first - from);
    side->kept = (size_t)(end - first);
    side->same = resized == length;
    if (!side->same)
        return find_weights(side, (size_t)length, (size_t)resized, (size_t)first, scale, cubic);
    side->count = 1;
    side->firsts = malloc(side->kept * sizeof(size_t));
    for (size_t i = 0; side->firsts && i < side->kept; i++)
        side->firsts[i] = (size_t)first + i;
    return side->firsts != NULL;
}

static int run(const struct job *job)
{
    struct room room;
    memset(&room, 0, sizeof room);
    int done = make_side(&room.rows, job->out_height, job->resized_height, job->top, job->height, job->row_scale,
                         job->cubic) &&
               make_side(&room.columns, job->out_width, job->resized_width, job->left, job->width, job->column_scale,
                         job->cubic);
    if (done) {
        room.places = room.rows.count + ROWS;
        room.line_nbytes = room.columns.kept * CHANNELS + SLACK;
        room.sources = malloc(room.rows.count * sizeof(*room.sources));
        room.lines = calloc(room.places, room.line_nbytes); /* what lies between lines is read, too */
        done = room.sources && room.lines;
    }
    for (int i = 0; done && i < ROWS; i++)
        done = !!(room.ends[i] = calloc((size_t)job->width * CHANNELS + room.columns.count * CHANNELS + SLACK, 1));
    if (done)
        fit_one(job, &room);
    for (int i = 0; i < ROWS; i++)
        free(room.ends[i]);
    free(room.sources);
    free(room.lines);
    free(room.rows.firsts);
    free(room.rows.weights);
    free(room.columns.firsts);
    free(room.columns.weights);
    return done;
}

static int is_available(void)
{
    return __builtin_cpu_supports("avx2");
}

#else

static int run(const struct job *job)
{
    (void)job;
    return 0;
}

static int is_available(void)
{
    return 0;
}

#endif

/* Comparisons with what is no number are false. */
static int is_side(Py_ssize_t length, Py_ssize_t size, Py_ssize_t resized, Py_ssize_t from, double scale)
{
    return length > 0 && length <= MOST_SIDE && size > 0 && size <= MOST_SIDE && resized > 0 && resized <= MOST_SIDE &&
           from > -size && from < resized && scale > 0 && scale * (double)resized <= (double)length * (1 + 1e-9);
}

static PyObject *fit(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer pixels, out;
    struct job job;
    if (!PyArg_ParseTuple(args, "y*w*(nn)(nn)(nn)(nn)(dd)p:fit", &pixels, &out, &job.height, &job.width, &job.out_height,
                          &job.out_width, &job.resized_height, &job.resized_width, &job.top, &job.left, &job.row_scale,
                          &job.column_scale, &job.cubic))
        return NULL;
    PyObject *result = NULL;
    job.pixels = pixels.buf;
    job.out = out.buf;
    if (!is_side(job.height, job.out_height, job.resized_height, job.top, job.row_scale) ||
        !is_side(job.width, job.out_width, job.resized_width, job.left, job.column_scale) ||
        pixels.len != job.height * job.width * CHANNELS || out.len != job.out_height * job.out_width * CHANNELS) {
        PyErr_SetString(PyExc_ValueError, "sizes that do not fit together");
    } else {
        int done;
        Py_BEGIN_ALLOW_THREADS
        done = is_available() && run(&job);
        Py_END_ALLOW_THREADS
        result = done ? Py_NewRef(Py_None) : PyErr_NoMemory();
    }
    PyBuffer_Release(&pixels);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"fit", fit, METH_VARARGS,
     "fit(pixels, out, size, out_size, resized_size, place, scales, cubic)\n\n"
     "out = the part from `place` on, and as large as out_size, of the picture resized to resized_size, by `scales` rows\n"
     "and columns of the picture for each new one. Pixels of out that lie outside of it are black."},
    {NULL, NULL, 0, NULL}};

static int add_constants(PyObject *module)
{
    return PyModule_AddObjectRef(module, "AVAILABLE", is_available() ? Py_True : Py_False);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, add_constants},
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_fit", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fit(void)
{
    return PyModuleDef_Init(&definition);
}
