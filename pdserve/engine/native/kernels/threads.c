#include "threads.h"

/* Changes with each change of a function's arguments: library.py compares. */
#define ABI 6

void (*run_parallel)(region, void *, unsigned, unsigned);

API int pd_abi(void) { return ABI; }
API int pd_activation_bytes(void) { return sizeof(act); }
API void pd_use_threads(void *function) { run_parallel = (void (*)(region, void *, unsigned, unsigned))function; }

static void take(void *shared) {
    Pieces *pieces = shared;
    for (;;) {
        int64_t piece = atomic_fetch_add_explicit(&pieces->next, 1, memory_order_relaxed);
        if (piece >= pieces->num_pieces) return;
        pieces->run(pieces->job, piece);
    }
}

void run_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, int threads) {
    if (threads <= 1 || num_pieces <= 1 || !run_parallel) {
        for (int64_t piece = 0; piece < num_pieces; piece++) run(job, piece);
        return;
    }
    Pieces pieces = {run, job, num_pieces, 0};
    unsigned wanted = num_pieces < threads ? (unsigned)num_pieces : (unsigned)threads;
    run_parallel(take, &pieces, wanted, 0);
}
