#include "threads.h"

/* Changes with each change of a function's arguments: library.py compares. */
#define ABI 8

void (*run_parallel)(region, void *, unsigned, unsigned);

API int pd_abi(void) { return ABI; }
API int pd_activation_bytes(void) { return sizeof(act); }
API void pd_use_threads(void *function) { run_parallel = (void (*)(region, void *, unsigned, unsigned))function; }

/* A team's state: how many help with the job, whether more may join them, whether there will be no other one, and the
 * job's number. */
#define HELPERS 0xffffLL
#define IS_OPEN 0x10000LL
#define IS_OVER 0x20000LL
#define NUMBER 0x40000LL

#define WORTH_A_CALL 16
#define SPINS 2000 /* some ten microseconds; then whoever wants the core may have it */

INLINE void wait_a_little(int *turns) {
#if defined(__x86_64__)
    if (++*turns < SPINS) {
        __builtin_ia32_pause();
        return;
    }
    long result = 24; /* sched_yield */
    __asm__ volatile("syscall" : "+a"(result) : : "rcx", "r11", "memory");
#elif defined(__aarch64__)
    if (++*turns < SPINS) {
        __asm__ volatile("yield");
        return;
    }
    register long number __asm__("x8") = 124; /* sched_yield */
    register long result __asm__("x0");
    __asm__ volatile("svc 0" : "=r"(result) : "r"(number) : "memory");
#endif
}

static void take(Pieces *pieces, int64_t own) {
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

static void help(Team *team, int64_t own) {
    long long done = 0; /* jobs; there is no more to take of one that is still open */
    int turns = 0;
    for (;;) {
        long long state = atomic_load_explicit(&team->state, memory_order_acquire);
        if (state & IS_OVER) return;
        if (!(state & IS_OPEN) || state / NUMBER == done ||
            !atomic_compare_exchange_strong_explicit(&team->state, &state, state + 1, memory_order_acq_rel, memory_order_relaxed)) {
            wait_a_little(&turns);
            continue;
        }
        take(&team->pieces, own);
        done = state / NUMBER;
        atomic_fetch_sub_explicit(&team->state, 1, memory_order_release);
        turns = 0;
    }
}

static void take_part(void *shared) {
    Team *team = shared;
    take(&team->pieces, atomic_fetch_add_explicit(&team->num_there, 1, memory_order_relaxed));
}

void run_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, Team *team) {
    if (team->num_threads <= 1 || num_pieces <= 1 || !run_parallel) {
        for (int64_t piece = 0; piece < num_pieces; piece++) run(job, piece);
        return;
    }
    int64_t wanted = num_pieces < team->num_threads ? num_pieces : team->num_threads;
    int64_t num_ranges = wanted < MAX_RANGES ? wanted : MAX_RANGES, at_once = num_pieces / (num_ranges * RUNS);
    Pieces *pieces = &team->pieces;
    pieces->run = run, pieces->job = job, pieces->num_ranges = num_ranges, pieces->at_once = at_once ? at_once : 1;
    for (int64_t i = 0; i < num_ranges; i++) {
        atomic_store_explicit(&pieces->ranges[i].next, num_pieces * i / num_ranges, memory_order_relaxed);
        pieces->ranges[i].end = num_pieces * (i + 1) / num_ranges;
    }
    if (!team->num_there) {
        run_parallel(take_part, team, (unsigned)wanted, 0);
        team->num_there = 0;
        return;
    }
    long long state = (atomic_load_explicit(&team->state, memory_order_relaxed) & ~IS_OPEN) + NUMBER;
    atomic_store_explicit(&team->state, state | IS_OPEN, memory_order_release);
    take(pieces, 0);
    atomic_fetch_and_explicit(&team->state, ~IS_OPEN, memory_order_acq_rel);
    int turns = 0;
    while (atomic_load_explicit(&team->state, memory_order_acquire) & HELPERS) wait_a_little(&turns);
}

void run_small_pieces(void (*run)(const void *job, int64_t piece), const void *job, int64_t num_pieces, Team *team) {
    if (team->num_there || num_pieces >= WORTH_A_CALL) {
        run_pieces(run, job, num_pieces, team);
        return;
    }
    for (int64_t piece = 0; piece < num_pieces; piece++) run(job, piece);
}

typedef struct {
    Team team;
    void (*lead)(const void *job, Team *team);
    const void *job;
} Work;

static void lead_or_help(void *shared) {
    Work *work = shared;
    int64_t own = atomic_fetch_add_explicit(&work->team.num_there, 1, memory_order_relaxed);
    if (own) {
        help(&work->team, own);
        return;
    }
    work->lead(work->job, &work->team);
    atomic_fetch_or_explicit(&work->team.state, IS_OVER, memory_order_release);
}

void run_as_team(void (*lead)(const void *job, Team *team), const void *job, int threads) {
    Work work;
    work.team.num_threads = threads, work.team.num_there = 0, work.team.state = 0, work.lead = lead, work.job = job;
    if (threads <= 1 || !run_parallel)
        lead(job, &work.team);
    else
        run_parallel(lead_or_help, &work, (unsigned)threads, 0);
}
