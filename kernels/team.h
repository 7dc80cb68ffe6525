/* Interface of the team of threads (team.c), which is in another library. */

#ifndef OFFLOAD_RT_TEAM_H
#define OFFLOAD_RT_TEAM_H

#include <stdint.h>

/* A function that computes one part of a call. */
typedef void (*Function)(const void *call, int64_t part);

/* Type of `team_run`, which computes parts [0, parts) on up to `threads` threads, including the caller. */
typedef void (*TeamRun)(Function function, const void *call, int64_t parts, int threads);

#endif
