/* Reading many rows of a file into many places, giving up the GIL once: what shardio/reading/file_reader.py asks for.

   os.preadv gives it up and takes it again for every row. Beside a thread that computes in Python, each taking waits up
   to 5 ms, which is longer than the read. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <unistd.h>

#define PAGE 4096

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
            PyErr_Format(PyExc_IndexError, "row %zd: from byte %lld to byte %lld of %zd", i, (long long)from[i],
                         (long long)to[i], out.len);
            goto release;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (; done < count; done++) {
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

static PyMethodDef methods[] = {
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
