/* The module magneto._C: calls the init function of each file. */
#include "magneto.h"

typedef int (*init_function)(PyObject *module);

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "magneto._C",
    .m_doc = "Frame evaluation, guards and the plan executor of magneto.",
    .m_size = -1, /* one interpreter only: the frame-evaluation hook is per process */
};

__attribute__((visibility("default"))) PyMODINIT_FUNC
PyInit__C(void)
{
    init_function inits[] = {mg_guards_init, mg_plan_init,   mg_resume_init,   mg_state_init,     mg_frame_init,
                             mg_entry_init,  mg_region_init, mg_activate_init, mg_eval_frame_init, mg_callable_init,
                             mg_pages_init,  mg_launch_init,   mg_blocks_init};
    PyObject *module = PyModule_Create(&module_def);
    if (module == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < sizeof(inits) / sizeof(inits[0]); i++) {
        if (inits[i] != NULL && inits[i](module) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    }
    return module;
}
