/* The few declarations of the DLPack C exchange API (ABI of DLPack 1.x) that we use; shared by guards.c and plan.c.
 *
 * torch >= 2.10 offers a capsule named MG_DLPACK_CAPSULE at torch.Tensor.__dlpack_c_exchange_api__, whose pointer is an
 * mg_dlpack_api. `view_of` fills an mg_dltensor with borrowed pointers (shape and strides live as long as the tensor's
 * metadata is not changed): no allocation, no reference count, about 30 ns. */
#ifndef MAGNETO_DLPACK_H
#define MAGNETO_DLPACK_H

#include <stdint.h>

#define MG_DLPACK_CAPSULE "dlpack_exchange_api"
#define MG_DLPACK_MAJOR 1

enum { MG_DL_CPU = 1, MG_DL_CUDA = 2 }; /* device_type values that we name */

typedef struct {
    int32_t device_type;
    int32_t device_id;
} mg_dldevice;

typedef struct {
    uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool, 7.. float8 and smaller */
    uint8_t bits;
    uint16_t lanes;
} mg_dldtype;

typedef struct {
    void *data; /* add byte_offset; torch passes the address of the first element and byte_offset 0 */
    mg_dldevice device;
    int32_t ndim;
    mg_dldtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; may be NULL for ndim 0 */
    uint64_t byte_offset;
} mg_dltensor;

/* One integer that tells all dtypes apart: code | bits << 8 | lanes << 16. */
#define MG_DTYPE_KEY(d) ((uint32_t)(d).code | (uint32_t)(d).bits << 8 | (uint32_t)(d).lanes << 16)

typedef struct mg_dlpack_header {
    struct {
        uint32_t major, minor;
    } version;
    struct mg_dlpack_header *prev_api; /* an older API, or NULL */
} mg_dlpack_header;

/* A tensor with an owner. */
typedef struct mg_dlmanaged {
    struct {
        uint32_t major, minor;
    } version;
    void *context;
    void (*deleter)(struct mg_dlmanaged *self);
    uint64_t flags;
    mg_dltensor tensor;
} mg_dlmanaged;

typedef struct {
    mg_dlpack_header header;
    void *managed_tensor_allocator;
    void *managed_tensor_from_py_object_no_sync;
    int (*to_py_object)(mg_dlmanaged *tensor, void **out); /* takes the tensor; 0, or -1 with a Python exception set; may be NULL */
    int (*view_of)(void *py_object, mg_dltensor *out); /* 0, or -1 with a Python exception set; may be NULL */
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **out);
} mg_dlpack_api;

#endif
