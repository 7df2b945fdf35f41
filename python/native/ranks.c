/* How Ctrl-C ends a wait of a rank group. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include "native.h"

#include <unistd.h>

bool coxpy_interrupted(void *raised)
{
    /* Python runs signal handlers on the main thread only. */
    if (gettid() != getpid())
        return false;
    PyGILState_STATE state = PyGILState_Ensure();
    const bool interrupted = PyErr_CheckSignals() != 0;
    if (interrupted) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        if (trace)
            PyException_SetTraceback(value, trace);
        if (PyList_Append(raised, value))
            PyErr_Clear();
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
    }
    PyGILState_Release(state);
    return interrupted;
}
