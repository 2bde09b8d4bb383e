#include "threads.h"

/* Changes with each change of a function's arguments: library.py compares. */
#define ABI 6

void (*run_parallel)(region, void *, unsigned, unsigned);

API int pd_abi(void) { return ABI; }
API int pd_activation_bytes(void) { return sizeof(act); }
API void pd_use_threads(void *function) { run_parallel = (void (*)(region, void *, unsigned, unsigned))function; }

static void take(void *shared) {
    Pieces *pieces = shared;
    int64_t own = atomic_fetch_add_explicit(&pieces->num_threads, 1, memory_order_relaxed);
    for (int64_t i = 0; i < pieces->num_ranges; i++) {
        Range *range = &pieces->ranges[(own + i) % pieces->num_ranges];
        for (;;) {
            int64_t piece = atomic_fetch_add_explicit(&range->next, pieces->at_once, memory_order_relaxed);
            if (piece >= range->end) break;
            int64_t end = piece + pieces->at_once < range->end ? piece + pieces->at_once : range->end;
            for (; piece < end; piece++) pieces->run(pieces->job, piece);
        }
    }
}

void run_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, int threads) {
    if (threads <= 1 || num_pieces <= 1 || !run_parallel) {
        for (int64_t piece = 0; piece < num_pieces; piece++) run(job, piece);
        return;
    }
    int64_t wanted = num_pieces < threads ? num_pieces : threads, num_ranges = wanted < MAX_RANGES ? wanted : MAX_RANGES;
    int64_t at_once = num_pieces / (num_ranges * RUNS);
    Pieces pieces; /* most of its ranges are of no use */
    pieces.run = run, pieces.job = job, pieces.num_ranges = num_ranges, pieces.at_once = at_once ? at_once : 1;
    pieces.num_threads = 0;
    for (int64_t i = 0; i < num_ranges; i++) {
        pieces.ranges[i].next = num_pieces * i / num_ranges;
        pieces.ranges[i].end = num_pieces * (i + 1) / num_ranges;
    }
    run_parallel(take, &pieces, (unsigned)wanted, 0);
}
