/* A base class for objects that clean up when they are freed, and that must not lose a Ctrl-C: shardio/kernels/finalized.py.

   Signal handlers run between the lines of the main thread. What they raise inside a finalizer, the interpreter prints
   and drops, and during a garbage collection they have no other line to come between. So this finalizer is in C: it
   calls the method again that was interrupted, and raises the exception once more where the main thread goes on. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

static int is_main_thread(void)
{
    PyObject *threading = PyImport_ImportModule("threading"), *thread = NULL, *ident = NULL;
    if (threading != NULL && (thread = PyObject_CallMethod(threading, "main_thread", NULL)) != NULL)
        ident = PyObject_GetAttrString(thread, "ident");
    int same = ident != NULL && PyLong_AsUnsignedLong(ident) == PyThread_get_thread_ident();
    Py_XDECREF(threading);
    Py_XDECREF(thread);
    Py_XDECREF(ident);
    PyErr_Clear();
    return same;
}

/* Whether Python is in a finalizer of someone else's, or in a callback of a weak reference: there it would be lost, too. */
static int is_finalizing(void)
{
    int found = 0;
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        PyFrameObject *back = PyFrame_GetBack(frame);
        const char *file = PyUnicode_AsUTF8(code->co_filename);
        found |= !PyUnicode_CompareWithASCIIString(code->co_name, "__del__") || (file && strstr(file, "weakref"));
        Py_DECREF(code);
        Py_DECREF(frame);
        frame = back;
    }
    PyErr_Clear();
    return found;
}

static int raise_again(void *error)
{
    if (is_finalizing() && Py_AddPendingCall(raise_again, error) == 0)
        return 0;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return -1;
}

/* Takes the exception that is set. Its frames are left behind: they would refer to the object that is being freed. */
static PyObject *take_error(void)
{
    PyObject *type, *error, *frames;
    PyErr_Fetch(&type, &error, &frames);
    PyErr_NormalizeException(&type, &error, &frames);
    PyException_SetTraceback(error, Py_None);
    Py_XDECREF(type);
    Py_XDECREF(frames);
    return error;
}

static void finalize(PyObject *self)
{
    PyObject *type, *value, *frames, *interruption = NULL, *result;
    PyErr_Fetch(&type, &value, &frames); /* objects are freed while an exception is on its way, too */
    while (!(result = PyObject_CallMethod(self, "finalize", NULL)) && !PyErr_ExceptionMatches(PyExc_Exception))
        Py_XSETREF(interruption, take_error());
    if (result == NULL)
        PyErr_WriteUnraisable(self);
    Py_XDECREF(result);
    if (interruption != NULL && (!is_main_thread() || Py_AddPendingCall(raise_again, interruption) < 0)) {
        PyErr_SetObject((PyObject *)Py_TYPE(interruption), interruption);
        PyErr_WriteUnraisable(self);
        Py_DECREF(interruption);
    }
    PyErr_Restore(type, value, frames);
}

static PyType_Slot type_slots[] = {{Py_tp_finalize, finalize}, {0, NULL}};

static PyType_Spec spec = {"shardio.kernels._finalized.Finalized", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           type_slots};

static int fill(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&spec);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Finalized", type) < 0;
    Py_XDECREF(type);
    return -failed;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill},
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_finalized", NULL, 0, NULL, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__finalized(void)
{
    return PyModuleDef_Init(&definition);
}
