/* Memory of large results, which serves later results instead of going back to the system (blocks.c). */
#ifndef MAGNETO_BLOCKS_H
#define MAGNETO_BLOCKS_H

#include "magneto.h"
#include "dlpack.h"

#define MG_BLOCK_WORTH ((int64_t)8 << 20) /* bytes: below, the C library's heap keeps the memory by itself */

/* Bytes from the first to the last element. */
int64_t mg_block_extent(const mg_dltensor *like);
/* A new tensor of the CPU with the layout and type of `like` (its data are not looked at) in `bytes` bytes of such memory. NULL without an exception where that cannot be had. */
PyObject *mg_block_tensor(const mg_dlpack_api *api, const mg_dltensor *like, int64_t bytes);

#endif
