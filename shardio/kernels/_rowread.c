/* Reading many rows of a file into many places, giving up the GIL once: what shardio/kernels/rowread.py asks for.

   os.preadv gives it up and takes it again for every row. Beside a thread that computes in Python, each taking waits up
   to 5 ms, which is longer than the read. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096

/* A byte that ends the reads of this thread, once it is set: none is begun after the one under way. */
static __thread const volatile char *ended;

static PyObject *end_with(PyObject *module, PyObject *flag)
{
    (void)module;
    Py_buffer view;
    if (PyObject_GetBuffer(flag, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    ended = view.len ? view.buf : NULL;
    PyBuffer_Release(&view); /* the caller keeps it for as long as the thread reads */
    Py_RETURN_NONE;
}

static void drop(int descriptor, int64_t offset, size_t nbytes)
{
#ifdef POSIX_FADV_DONTNEED
    int64_t start = offset / PAGE * PAGE, stop = (offset + (int64_t)nbytes + PAGE - 1) / PAGE * PAGE;
    posix_fadvise(descriptor, start, stop - start, POSIX_FADV_DONTNEED);
#else
    (void)descriptor, (void)offset, (void)nbytes;
#endif
}

static PyObject *read_rows(PyObject *module, PyObject *args)
{
    (void)module;
    int descriptor, drop_behind;
    Py_ssize_t nbytes;
    Py_buffer offsets, places, out;
    if (!PyArg_ParseTuple(args, "iy*y*nw*p:read_rows", &descriptor, &offsets, &places, &nbytes, &out, &drop_behind))
        return NULL;
    PyObject *result = NULL;
    const int64_t *from = offsets.buf, *to = places.buf;
    Py_ssize_t count = offsets.len / 8, done = 0;
    if (nbytes <= 0 || offsets.len % 8 || places.len != offsets.len) {
        PyErr_SetString(PyExc_ValueError, "expected as many places as offsets, and rows of at least a byte");
        goto release;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (from[i] < 0 || to[i] < 0 || nbytes > out.len || to[i] > out.len - nbytes) {
            PyErr_Format(PyExc_IndexError, "row %zd: cannot read %zd bytes from byte %lld of the file to byte %lld of %zd",
                         i, nbytes, (long long)from[i], (long long)to[i], out.len);
            goto release;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (; done < count && !(ended && *ended); done++) {
        /* Anything but the whole row is left to the caller, who knows what may be tried again. */
        if (pread(descriptor, (char *)out.buf + to[done], (size_t)nbytes, (off_t)from[done]) != nbytes)
            break;
        if (drop_behind)
            drop(descriptor, from[done], (size_t)nbytes);
    }
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(done);
release:
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&places);
    PyBuffer_Release(&out);
    return result;
}

/* A window of a picture in the file: lines a stride apart, of which n bytes are wanted. */
struct window {
    int64_t start; /* the first byte that is wanted */
    int64_t lines, n;
    int64_t place; /* where in `out` it goes */
};

static int64_t end_of(const struct window *window, int64_t stride)
{
    return window->start + (window->lines - 1) * stride + window->n;
}

/* Reads whole sectors around the window into `scratch`, and copies its lines out of them. Whole lines that make up whole
   sectors are read to where they go. */
static int read_window(int descriptor, const struct window *window, int64_t stride, int64_t alignment, char *scratch,
                       char *out, int drop_behind)
{
    int64_t sectors = window->start / alignment * alignment, wanted = end_of(window, stride) - sectors;
    int64_t length = (wanted + alignment - 1) / alignment * alignment;
    char *to = out + window->place;
    int direct = window->n == stride && sectors == window->start && length == wanted && (uintptr_t)to % (uintptr_t)alignment == 0;
    if (pread(descriptor, direct ? to : scratch, (size_t)length, (off_t)sectors) < wanted)
        return 0;
    const char *from = scratch + (window->start - sectors);
    for (int64_t line = direct ? window->lines : 0; line < window->lines; line++, from += stride, to += window->n)
        memcpy(to, from, (size_t)window->n);
    if (drop_behind)
        drop(descriptor, sectors, (size_t)length);
    return 1;
}

static PyObject *read_windows(PyObject *module, PyObject *args)
{
    (void)module;
    int descriptor, drop_behind;
    long long stride, alignment;
    Py_buffer table, scratch, out;
    if (!PyArg_ParseTuple(args, "iy*LLw*w*p:read_windows", &descriptor, &table, &stride, &alignment, &scratch, &out,
                          &drop_behind))
        return NULL;
    PyObject *result = NULL;
    const struct window *windows = table.buf;
    Py_ssize_t count = table.len / (Py_ssize_t)sizeof *windows, done = 0;
    const int64_t most = (int64_t)1 << 40;
    if (table.len % (Py_ssize_t)sizeof *windows || stride <= 0 || stride > most || alignment <= 0 || alignment > most) {
        PyErr_SetString(PyExc_ValueError, "expected four numbers for each window, a stride and an alignment above 0");
        goto release;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const struct window *w = windows + i;
        /* Each number is compared before it is used in a product or a sum. */
        if (w->start < 0 || w->start > (int64_t)1 << 62 || w->n <= 0 || w->n > stride || w->lines <= 0 ||
            w->lines > scratch.len / stride + 1 || w->place < 0 || w->place > out.len ||
            w->lines > (out.len - w->place) / w->n ||
            (end_of(w, stride) - w->start / alignment * alignment + alignment - 1) / alignment * alignment >
                scratch.len) {
            PyErr_Format(PyExc_IndexError,
                         "window %zd: cannot read %lld lines of %lld bytes from byte %lld of the file to byte %lld of %zd", i,
                         (long long)w->lines, (long long)w->n, (long long)w->start, (long long)w->place, out.len);
            goto release;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    while (done < count && !(ended && *ended) &&
           read_window(descriptor, windows + done, stride, alignment, scratch.buf, out.buf, drop_behind))
        done++;
    Py_END_ALLOW_THREADS
    result = PyLong_FromSsize_t(done);
release:
    PyBuffer_Release(&table);
    PyBuffer_Release(&scratch);
    PyBuffer_Release(&out);
    return result;
}

/* Advice is never an error. */
static PyObject *will_need(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer spans;
    if (!PyArg_ParseTuple(args, "y*:will_need", &spans))
        return NULL;
    const uint64_t *span = spans.buf, *end = span + spans.len / 16 * 2;
    Py_BEGIN_ALLOW_THREADS
    for (; span < end; span += 2)
        madvise((void *)(uintptr_t)span[0], (size_t)span[1], MADV_WILLNEED);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&spans);
    Py_RETURN_NONE;
}

static PyObject *count_resident(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer pages;
    Py_ssize_t page_nbytes, found = 0;
    if (!PyArg_ParseTuple(args, "y*n:count_resident", &pages, &page_nbytes))
        return NULL;
    const uint64_t *page = pages.buf, *end = page + pages.len / 8;
    /* With the GIL: this is short, and beside a busy thread it could take 5 ms to get it back. */
    for (; page < end; page++) {
        unsigned char answer = 0;
        /* There is room for the answer of one page. */
        mincore((void *)(uintptr_t)*page, (size_t)(page_nbytes > PAGE ? PAGE : page_nbytes), (void *)&answer);
        found += answer & 1;
    }
    PyBuffer_Release(&pages);
    return PyLong_FromSsize_t(found);
}

static PyMethodDef methods[] = {
    {"end_with", end_with, METH_O, "end_with(flag)\n\nHave no further read begin in this thread once flag[0] is set."},
    {"count_resident", count_resident, METH_VARARGS,
     "count_resident(pages, page_nbytes)\n\nHow many pages of mapped memory, addresses, uint64, are in the page cache."},
    {"will_need", will_need, METH_VARARGS,
     "will_need(spans)\n\nHave the kernel begin to read spans of mapped memory: addresses, of pages, and bytes, uint64."},
    {"read_windows", read_windows, METH_VARARGS,
     "read_windows(descriptor, windows, stride, alignment, scratch, out, drop_behind)\n\n"
     "Read windows of pictures in the file, each four numbers: its first byte, its lines, `stride` bytes apart, the "
     "bytes of a line, and its place in `out`. Sectors of `alignment` bytes are read into `scratch`. Up to the first "
     "window that does not come whole; how many did."},
    {"read_rows", read_rows, METH_VARARGS,
     "read_rows(descriptor, offsets, places, nbytes, out, drop_behind)\n\n"
     "Read `nbytes` from each of the file's offsets to each byte place of `out`, up to the first row that does not come "
     "whole; how many did."},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rowread", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__rowread(void)
{
    return PyModuleDef_Init(&definition);
}
