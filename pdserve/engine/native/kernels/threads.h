/* Work on the threads of the OpenMP runtime that torch has loaded: no second pool that fights with it for the cores. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>

#include "vectors.h"

typedef void (*region)(void *);
/* GOMP_parallel of libgomp, or libomp's function of that name; NULL: everything runs on the calling thread. */
extern void (*run_parallel)(region body, void *shared, unsigned num_threads, unsigned flags);

/* How often a thread asks for more of its range: what is left when it comes late is taken by others. */
#define RUNS 4
#define MAX_RANGES 64

/* Neighbouring pieces. */
typedef struct {
    _Alignas(64) atomic_llong next;
    int64_t end;
} Range;

/* A job's pieces. Each thread has a range of its own, so that it has fetched what it takes next (linear.c, stored.h), and
 * writes lines that no other does; when it is through, it helps the others. Which thread takes a piece changes no result. */
typedef struct {
    void (*run)(const void *job, int64_t piece);
    const void *job;
    int64_t num_ranges, at_once;
    atomic_llong num_threads;
    Range ranges[MAX_RANGES];
} Pieces;

void run_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, int threads);
