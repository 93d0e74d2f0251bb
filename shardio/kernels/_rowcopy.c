/* Copying scattered rows, or a window of each, into one block: what shardio/kernels/rowcopy.py says, at the rate of memory.

   memcpy stores through the caches, which first reads every destination line from memory. A batch is larger than the
   caches and is read again much later, by a copy to the GPU or by another core; non-temporal stores write it straight
   to memory. Loads are prefetched by hand, because the hardware's prefetcher stops at every page
   and knows nothing of the next row.

   How a row is best walked through depends on the processor. On AMD's, one stream is best, and what costs most with many
   gigabytes in pages of 4 KiB is finding the pages, a walk through page tables that are in no cache: a prefetch walks
   too, so it is two pages ahead. On Intel's, prefetches so far ahead drive the row itself out of the hardware's
   prefetcher, both halves of a row in step are faster than one stream, and so are the lines of a window if they are put
   together in the nearest cache first.

   Rows may lie in a mapped file. A page that the storage cannot give, or that was cut off the file, is a SIGBUS, which
   would end the process: in the middle of a copy it ends the copy instead, and the caller learns at which row. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "guard.h"

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#define HAVE_X86 1
#include <immintrin.h>
#endif

/* Bytes between a load and its prefetch: two pages, so that the walk to the next page is begun early enough, too. */
#define AHEAD 8192
#define AHEAD_ON_INTEL 1024
/* Below, what is copied may stay in the caches until it is read: windows that are resampled next, say. */
#define LEAST_FOR_STREAMING (1 << 20)
#define LINE 64
#define PAGE 4096
/* Below, a row is not worth two streams. */
#define LEAST_FOR_HALVES (4 * PAGE)
/* Bytes of a window's lines that are put together before they are stored: they stay in the nearest cache. */
#define STAGE PAGE

/* Copies n bytes; `ahead` is where the bytes lie that are wanted a little later, prefetched at the same offsets. */
typedef void copy_function(uint8_t *to, const uint8_t *from, size_t n, const uint8_t *ahead);

static void copy_plain(uint8_t *to, const uint8_t *from, size_t n, const uint8_t *ahead)
{
    (void)ahead;
    memcpy(to, from, n);
}

#ifdef HAVE_X86

#define COPY_TWO_LINES(VECTOR, LOAD, STORE, TO, FROM, AHEAD_OF_IT)                                                     \
    do {                                                                                                               \
        VECTOR loaded[2 * LINE / sizeof(VECTOR)];                                                                      \
        _mm_prefetch((const char *)(AHEAD_OF_IT), _MM_HINT_T0);                                                        \
        _mm_prefetch((const char *)(AHEAD_OF_IT) + LINE, _MM_HINT_T0);                                                 \
        for (size_t k = 0; k < 2 * LINE / sizeof(VECTOR); k++)                                                         \
            loaded[k] = LOAD((const void *)((FROM) + k * sizeof(VECTOR)));                                             \
        for (size_t k = 0; k < 2 * LINE / sizeof(VECTOR); k++)                                                         \
            STORE((void *)((TO) + k * sizeof(VECTOR)), loaded[k]);                                                     \
    } while (0)

/* Non-temporal stores need an aligned destination: what is before its first whole line, and after its last, is copied
   the ordinary way. */
#define STREAMING_COPY(NAME, TARGET, VECTOR, LOAD, STORE)                                                              \
    __attribute__((target(TARGET))) static void NAME(uint8_t *to, const uint8_t *from, size_t n, const uint8_t *ahead) \
    {                                                                                                                  \
        size_t head = (size_t)(-(uintptr_t)to % LINE);                                                                 \
        if (head > n)                                                                                                  \
            head = n;                                                                                                  \
        memcpy(to, from, head);                                                                                        \
        size_t i = head;                                                                                               \
        for (; i + 2 * LINE <= n; i += 2 * LINE)                                                                       \
            COPY_TWO_LINES(VECTOR, LOAD, STORE, to + i, from + i, ahead + i);                                          \
        memcpy(to + i, from + i, n - i);                                                                               \
    }

STREAMING_COPY(copy_avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256)
STREAMING_COPY(copy_avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512)

#define COPY_TWO_LINES_AVX2(TO, FROM, AHEAD_OF_IT)                                                                     \
    COPY_TWO_LINES(__m256i, _mm256_loadu_si256, _mm256_stream_si256, TO, FROM, AHEAD_OF_IT)

/* Copies n bytes, a multiple of two lines, in each of two streams that are so far `apart`; `to` begins a line. */
__attribute__((target("avx2"))) static void copy_in_step(uint8_t *to, const uint8_t *from, size_t apart, size_t n,
                                                         const uint8_t *ahead)
{
    for (size_t i = 0; i < n; i += 2 * LINE) {
        COPY_TWO_LINES_AVX2(to + i, from + i, ahead + i);
        COPY_TWO_LINES_AVX2(to + apart + i, from + apart + i, ahead + apart + i);
    }
}

/* Stores the bytes of the stage from `begun` on; `to` begins a line. */
__attribute__((target("avx2"))) static void store_stage(uint8_t *to, const uint8_t *stage, size_t begun)
{
    size_t i = 0;
    if (begun) { /* the line has bytes of another row, or what is before `out` */
        memcpy(to + begun, stage + begun, LINE - begun);
        i = LINE;
    }
    for (; i < STAGE; i += sizeof(__m256i))
        _mm256_stream_si256((void *)(to + i), _mm256_load_si256((const void *)(stage + i)));
}

#endif

static const struct kernel {
    const char *name;
    copy_function *copy;
    int for_intel;
    size_t ahead;
} kernels[] = {
    {"plain", copy_plain, 0, AHEAD},
#ifdef HAVE_X86
    {"avx2", copy_avx2, 0, AHEAD},
    {"avx512", copy_avx512, 0, AHEAD},
    {"avx2-intel", copy_avx2, 1, AHEAD_ON_INTEL},
#endif
};

#define NUM_KERNELS ((int)(sizeof kernels / sizeof kernels[0]))

/* The kernel that is the fastest on this processor. */
static const char *best(void)
{
#ifdef HAVE_X86
    if (__builtin_cpu_supports("avx2"))
        return __builtin_cpu_is("intel") ? "avx2-intel" : "avx2";
#endif
    return "plain";
}

static int runs_here(int kernel)
{
    (void)kernel;
#ifdef HAVE_X86
    if (kernels[kernel].copy == copy_avx2)
        return __builtin_cpu_supports("avx2");
    if (kernels[kernel].copy == copy_avx512)
        return __builtin_cpu_supports("avx512f");
#endif
    return 1;
}

struct job {
    const uint8_t *rows;
    const int64_t *numbers;
    const int64_t *starts, *pieces, *piece_nbytes; /* of each; or all NULL: rows are copied whole */
    const int64_t *places; /* the first byte of each in `out`; or NULL: they fill it, one after the other */
    uint8_t *out;
    size_t count, row_nbytes, stride;
};

static const uint8_t *first_piece(const struct job *job, size_t i)
{
    return job->rows + (size_t)job->numbers[i] * job->row_nbytes + (job->starts ? (size_t)job->starts[i] : 0);
}

static size_t pieces_of(const struct job *job, size_t i)
{
    return job->starts ? (size_t)job->pieces[i] : 1;
}

static size_t piece_nbytes_of(const struct job *job, size_t i)
{
    return job->starts ? (size_t)job->piece_nbytes[i] : job->row_nbytes;
}

static void copy_whole(const struct kernel *kernel, uint8_t *to, const uint8_t *from, size_t n, const uint8_t *next)
{
    size_t most = n > kernel->ahead ? n - kernel->ahead : 0;
    kernel->copy(to, from, most, from + kernel->ahead);
    kernel->copy(to + most, from + most, n - most, next);
}

#ifdef HAVE_X86

static void copy_halves(uint8_t *to, const uint8_t *from, size_t n, const uint8_t *next)
{
    size_t head = (size_t)(-(uintptr_t)to % LINE), half = (n - head) / (4 * LINE) * (2 * LINE);
    size_t most = half - AHEAD_ON_INTEL;
    memcpy(to, from, head);
    to += head, from += head, next += head, n -= head;
    copy_in_step(to, from, half, most, from + AHEAD_ON_INTEL);
    copy_in_step(to + most, from + most, half, AHEAD_ON_INTEL, next);
    memcpy(to + 2 * half, from + 2 * half, n - 2 * half);
}

/* The pieces of row i, by way of the stage. Returns where the next row's bytes go. */
static uint8_t *copy_staged(const struct job *job, size_t i, uint8_t *to, const uint8_t *next_row)
{
    size_t n = piece_nbytes_of(job, i), pieces = pieces_of(job, i), ahead = 1 + AHEAD_ON_INTEL / n;
    const uint8_t *from = first_piece(job, i);
    uint8_t stage[STAGE] __attribute__((aligned(LINE)));
    size_t begun = (uintptr_t)to % LINE, used = begun;
    to -= begun;
    for (size_t piece = 0; piece < pieces; piece++, from += job->stride) {
        size_t later = piece + ahead;
        const uint8_t *wanted = later < pieces ? from + ahead * job->stride : next_row + (later - pieces) * job->stride;
        for (size_t k = 0; k < n; k += LINE)
            __builtin_prefetch(wanted + k);
        for (size_t done = 0, some; done < n; done += some) {
            some = n - done < STAGE - used ? n - done : STAGE - used;
            memcpy(stage + used, from + done, some);
            used += some;
            if (used == STAGE) {
                store_stage(to, stage, begun);
                to += STAGE, used = begun = 0;
            }
        }
    }
    memcpy(to + begun, stage + begun, used - begun);
    return to + used;
}

#endif

/* Returns where the next row's bytes go. */
static uint8_t *copy_row(const struct job *job, const struct kernel *kernel, size_t i, uint8_t *to)
{
    size_t n = piece_nbytes_of(job, i), pieces = pieces_of(job, i);
    const uint8_t *from = first_piece(job, i), *next_row = first_piece(job, i + 1 < job->count ? i + 1 : i);
#ifdef HAVE_X86
    if (kernel->for_intel && pieces > 1)
        return copy_staged(job, i, to, next_row);
    if (kernel->for_intel && n >= LEAST_FOR_HALVES) {
        copy_halves(to, from, n, next_row);
        return to + n;
    }
#endif
    if (pieces == 1) {
        copy_whole(kernel, to, from, n, next_row);
        return to + n;
    }
    for (size_t piece = 0, later = 1 + kernel->ahead / job->stride; piece < pieces; piece++, later++, to += n)
        kernel->copy(to, from + piece * job->stride, n,
                     later < pieces ? from + later * job->stride : next_row + (later - pieces) * job->stride);
    return to;
}

/* Where a copy of this thread goes on if a page fails; NULL while there is none. */
static __thread sigjmp_buf *volatile way_out;
/* Whether this thread's fault was given to the handler that was there before ours. */
static __thread volatile sig_atomic_t passed_on;
static struct sigaction handled_before;

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    if (way_out)
        siglongjmp(*way_out, 1);
    /* Not ours. A handler that was set between two of our own settings passes the signal on to us: once is enough. */
    int again = passed_on;
    passed_on = 1;
    if (!again && handled_before.sa_flags & SA_SIGINFO) {
        handled_before.sa_sigaction(number, info, context);
    } else if (!again && handled_before.sa_handler != SIG_DFL && handled_before.sa_handler != SIG_IGN) {
        handled_before.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        raise(number);
    }
    passed_on = 0;
}

/* Before every copy: others set handlers too, and some put back what was there before theirs, as faulthandler does when
   it is disabled. */
static void handle_bus_errors(void)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    struct sigaction now;
    if (!sigaction(SIGBUS, NULL, &now) && now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_bus_error)
        return;
    /* SA_NODEFER, because a jump out of the handler leaves the signal blocked otherwise. */
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    if (pthread_mutex_trylock(&mutex)) /* another thread is at it; or was, when this process was forked */
        return;
    sigaction(SIGBUS, NULL, &now);
    if (!(now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_bus_error)) {
        handled_before = now;
        sigaction(SIGBUS, &ours, NULL);
    }
    pthread_mutex_unlock(&mutex);
}

static void enter_guard(sigjmp_buf *here)
{
    handle_bus_errors();
    passed_on = 0;
    way_out = here;
    atomic_signal_fence(memory_order_seq_cst);
}

static void leave_guard(void)
{
    atomic_signal_fence(memory_order_seq_cst);
    way_out = NULL;
}

static struct guard guard = {enter_guard, leave_guard};

/* How many rows were copied: all, unless a page of the next one failed. */
static size_t run(const struct job *job, const struct kernel *kernel)
{
    sigjmp_buf here;
    volatile size_t done = 0;
    if (!sigsetjmp(here, 0)) {
        enter_guard(&here);
        for (uint8_t *to = job->out; done < job->count; done++)
            to = copy_row(job, kernel, done, job->places ? job->out + job->places[done] : to);
    }
    leave_guard();
#ifdef HAVE_X86
    _mm_sfence(); /* other threads see non-temporal stores only after a fence */
#endif
    return done;
}

/* Nothing is copied unless every row and window lies inside, and so does its place in `out`; or, without places, all of
   them together fill `out`. */
static int check(const struct job *job, size_t num_rows, size_t out_nbytes)
{
    size_t left = out_nbytes, done = 0;
    for (size_t i = 0; i < job->count; i++) {
        size_t n = piece_nbytes_of(job, i), pieces = pieces_of(job, i);
        if (job->numbers[i] < 0 || (uint64_t)job->numbers[i] >= num_rows) {
            PyErr_Format(PyExc_IndexError, "expected row numbers from 0, below %zu; found %lld", num_rows,
                         (long long)job->numbers[i]);
            return 0;
        }
        if (!n || !pieces || n > job->row_nbytes || pieces - 1 > (job->row_nbytes - n) / job->stride) {
            PyErr_Format(PyExc_IndexError, "window %zu is empty, or larger than its row", i);
            return 0;
        }
        size_t most = job->row_nbytes - n - (pieces - 1) * job->stride;
        if (job->starts && (job->starts[i] < 0 || (uint64_t)job->starts[i] > most)) {
            PyErr_Format(PyExc_IndexError, "window %zu must begin at a byte of its row from 0 to %zu; found %lld", i,
                         most, (long long)job->starts[i]);
            return 0;
        }
        if (job->places) {
            if (job->places[i] < 0 || (uint64_t)job->places[i] > out_nbytes) {
                PyErr_Format(PyExc_IndexError, "expected places in out from 0 to %zu; found %lld", out_nbytes,
                             (long long)job->places[i]);
                return 0;
            }
            left = out_nbytes - (size_t)job->places[i];
        }
        if (n > left || pieces > left / n)
            break;
        left -= pieces * n;
        done++;
    }
    if ((left && !job->places) || done < job->count) {
        PyErr_Format(PyExc_ValueError, "out must be as large as all rows or windows together; found %zu bytes",
                     out_nbytes);
        return 0;
    }
    return 1;
}

static PyObject *copy(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer rows, numbers, starts, pieces, piece_nbytes, places, out;
    Py_ssize_t row_nbytes, stride;
    int kernel;
    if (!PyArg_ParseTuple(args, "y*ny*z*z*z*nz*w*i:copy", &rows, &row_nbytes, &numbers, &starts, &pieces, &piece_nbytes,
                          &stride, &places, &out, &kernel))
        return NULL;
    PyObject *result = NULL;
    struct job job = {rows.buf, numbers.buf, starts.buf, pieces.buf, piece_nbytes.buf, places.buf, out.buf,
                      (size_t)numbers.len / 8, (size_t)row_nbytes, (size_t)(stride ? stride : row_nbytes)}; /* 0: one piece */
    if (row_nbytes <= 0 || stride < 0 || numbers.len % 8 || (places.buf && places.len != numbers.len) ||
        (starts.buf && (!pieces.buf || !piece_nbytes.buf || starts.len != numbers.len || pieces.len != numbers.len ||
                        piece_nbytes.len != numbers.len))) {
        PyErr_SetString(PyExc_ValueError, "expected sizes above 0, and one window and place for each row number");
    } else if (kernel < 0 || kernel >= NUM_KERNELS || !runs_here(kernel)) {
        PyErr_Format(PyExc_ValueError, "this processor cannot run kernel number %d", kernel);
    } else if (check(&job, (size_t)(rows.len / row_nbytes), (size_t)out.len)) {
        size_t done;
        Py_BEGIN_ALLOW_THREADS
        done = run(&job, &kernels[out.len < LEAST_FOR_STREAMING ? 0 : kernel]);
        Py_END_ALLOW_THREADS
        result = PyLong_FromSize_t(done);
    }
    PyBuffer_Release(&rows);
    PyBuffer_Release(&numbers);
    PyBuffer_Release(&starts);
    PyBuffer_Release(&pieces);
    PyBuffer_Release(&piece_nbytes);
    PyBuffer_Release(&places);
    PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS,
     "copy(rows, row_nbytes, numbers, starts, pieces, piece_nbytes, stride, places, out, kernel)\n\n"
     "out = for each number: the row; or so many pieces of it of so many bytes, `stride` bytes apart, the first at its "
     "start; at the byte of `out` in `places`, or one after the other. How many rows: all, unless storage fails behind "
     "one."},
    {NULL, NULL, 0, NULL}};

static int set_up(PyObject *module)
{
    PyObject *names = PyList_New(0);
    if (!names)
        return -1;
    for (int kernel = 0; kernel < NUM_KERNELS; kernel++) {
        PyObject *name = PyUnicode_FromString(runs_here(kernel) ? kernels[kernel].name : "");
        if (!name || PyList_Append(names, name)) {
            Py_XDECREF(name);
            Py_DECREF(names);
            return -1;
        }
        Py_DECREF(name);
    }
    int failed = PyModule_AddObjectRef(module, "KERNELS", names);
    Py_DECREF(names);
    PyObject *capsule = failed ? NULL : PyCapsule_New(&guard, GUARD_NAME, NULL);
    failed = !capsule || PyModule_AddObjectRef(module, "GUARD", capsule);
    Py_XDECREF(capsule);
    return failed ? -1 : PyModule_AddStringConstant(module, "BEST", best());
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, set_up},
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rowcopy", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rowcopy(void)
{
    return PyModuleDef_Init(&definition);
}
