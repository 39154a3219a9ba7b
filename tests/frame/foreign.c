/* An evaluation function of somebody else, as torch._dynamo's: counts frames and hands them on to the one it found installed. */
#include <Python.h>

struct _PyInterpreterFrame;
typedef PyObject *(*evaluate)(PyThreadState *, struct _PyInterpreterFrame *, int);

static evaluate previous;
long entered;
int go_on; /* hand on to the one found (otherwise to CPython's) */

static PyObject *
foreign(PyThreadState *ts, struct _PyInterpreterFrame *f, int throwflag)
{
    entered++;
    return (go_on ? previous : _PyEval_EvalFrameDefault)(ts, f, throwflag);
}

void
install(void)
{
    previous = _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get());
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), foreign);
}

int
installed(void)
{
    return _PyInterpreterState_GetEvalFrameFunc(PyInterpreterState_Get()) == foreign;
}

void
uninstall(void)
{
    _PyInterpreterState_SetEvalFrameFunc(PyInterpreterState_Get(), previous);
}
