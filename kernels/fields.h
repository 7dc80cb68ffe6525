/* Describes a structure that Python fills, so that native_code.py can compare it with its own. */

#ifndef OFFLOAD_RT_FIELDS_H
#define OFFLOAD_RT_FIELDS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name; /* NULL after the last field: `size` is then that of the structure */
    int64_t offset, size;
} Field;

#define FIELD(Structure, name) {#name, offsetof(Structure, name), sizeof ((Structure *)0)->name}

/* FIELDS_OF begins the exported table `fields_of_<Structure>`. tests/native links several of the same name, hence weak. */
#define FIELDS_OF(Structure) __attribute__((weak)) const Field fields_of_##Structure[]
#define END_OF_FIELDS(Structure) {NULL, 0, sizeof(Structure)}

#endif
