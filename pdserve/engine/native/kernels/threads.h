/* Work on the threads of the OpenMP runtime that torch has loaded: no second pool that fights with it for the cores. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

#include "vectors.h"

typedef void (*region)(void *);
/* GOMP_parallel of libgomp, or libomp's function of that name; NULL: everything runs on the calling thread. */
extern void (*run_parallel)(region body, void *shared, unsigned num_threads, unsigned flags);

/* Pieces of a job, handed out in order to whoever asks: which thread gets which changes no result. */
typedef struct {
    void (*run)(const void *job, int64_t piece);
    const void *job;
    int64_t num_pieces;
    atomic_llong next;
} Pieces;

void run_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, int threads);
