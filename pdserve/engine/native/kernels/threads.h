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
    Range ranges[MAX_RANGES];
} Pieces;

/* Threads that work on one job after the other. One leads; the others wait for its next job, without sleep. A job's end
 * waits for those that have begun with it only: who comes late, since another process has its core, finds it done. */
typedef struct {
    int64_t num_threads;
    atomic_llong num_there; /* 0: each job calls its threads together by itself */
    _Alignas(64) atomic_llong state; /* see threads.c */
    Pieces pieces;
} Team;

/* A team whose jobs each call their threads together. Its other fields need not be set. */
#define TEAM(team, threads) \
    Team team; \
    team.num_threads = (threads), team.num_there = 0, team.state = 0

/* On the thread that leads. When it returns, all pieces have run. */
void run_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, Team *team);

/* Pieces so small that few of them aren't worth calling threads together. */
void run_small_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, Team *team);

/* lead(job, team) on one of so many threads, with the others at hand for its jobs. */
void run_as_team(void (*lead)(const void *job, Team *team), const void *job, int threads);
