/* The part of the DLPack C exchange protocol (version 1.3) that magneto reads.
 *
 * The declarations restate the public ABI of DLPack's `DLTensor` and `DLPackExchangeAPI`: a tensor library publishes one
 * static table of functions under `Tensor.__dlpack_c_exchange_api__` (a capsule named "dlpack_exchange_api"), and
 * `dltensor_from_py_object_no_sync` fills a borrowed `DLTensor` view of any of its tensors in some tens of nanoseconds.
 */
#ifndef MAGNETO_DLPACK_H
#define MAGNETO_DLPACK_H

#include <stdint.h>

#define MG_DLPACK_CAPSULE "dlpack_exchange_api"
#define MG_DLPACK_MAJOR 1

typedef struct {
    int32_t device_type; /* 1 is the CPU, 2 is CUDA */
    int32_t device_id;
} MgDLDevice;

typedef struct {
    uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 5 complex, 6 bool */
    uint8_t bits;
    uint16_t lanes;
} MgDLDataType;

typedef struct {
    void *data; /* NULL for tensors without elements */
    MgDLDevice device;
    int32_t ndim;
    MgDLDataType dtype;
    int64_t *shape;   /* borrowed from the tensor */
    int64_t *strides; /* in elements, borrowed from the tensor */
    uint64_t byte_offset;
} MgDLTensor;

typedef struct MgDLHeader {
    uint32_t major, minor;
    struct MgDLHeader *previous; /* an older table, or NULL */
} MgDLHeader;

typedef struct {
    MgDLHeader header;
    void *managed_tensor_allocator;
    void *managed_tensor_from_py_object_no_sync;
    void *managed_tensor_to_py_object_no_sync;
    int (*dltensor_from_py_object_no_sync)(void *py_object, MgDLTensor *out); /* may be NULL; -1 with an exception set on failure */
    void *current_work_stream;
} MgDLExchangeAPI;

#endif
