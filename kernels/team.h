/* How kernels call the team of threads (team.c), which another library holds. */

#ifndef OFFLOAD_RT_TEAM_H
#define OFFLOAD_RT_TEAM_H

#include <stdint.h>

/* Computes one part of a call. */
typedef void (*Function)(const void *call, int64_t part);

/* `team_run`: computes parts [0, parts) by up to `threads` threads, the caller included. */
typedef void (*TeamRun)(Function function, const void *call, int64_t parts, int threads);

#endif
