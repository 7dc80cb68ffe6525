/* Describe a structure that Python fills, so that native_code.py can compare it with the Python definition. */

#ifndef OFFLOAD_RT_FIELDS_H
#define OFFLOAD_RT_FIELDS_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    const char *name; /* NULL in the last entry, whose `size` is the size of the structure */
    int64_t offset, size;
} Field;

#define FIELD(Structure, name) {#name, offsetof(Structure, name), sizeof ((Structure *)0)->name}

/* FIELDS_OF begins the exported table `fields_of_<Structure>`. It is weak because tests/native links several tables of
the same name. */
#define FIELDS_OF(Structure) __attribute__((weak)) const Field fields_of_##Structure[]
#define END_OF_FIELDS(Structure) {NULL, 0, sizeof(Structure)}

#endif
