/* What is done to each row of activations by itself: norms, with or without a sum before them, and gated activations. */
#include "kernels.h"

#define ROWS_AT_ONCE 8

static void norm_rows(const void *shared, int64_t piece) {
    const Rows *job = shared;
    const int64_t width = job->width;
    int64_t end = (piece + 1) * ROWS_AT_ONCE;
    for (int64_t row = piece * ROWS_AT_ONCE; row < end && row < job->rows; row++) {
        act *x = job->x + row * width;
        vf squares = splat(0.0f);
        for (int64_t i = 0; i < width; i += W) {
            if (job->more) store_act(x + i, load_act(x + i) + load_act(job->more + row * width + i));
            vf value = load_act(x + i);
            squares = fma_(value, value, squares);
        }
        vf scale = splat(1.0f / __builtin_sqrtf(sum(squares) / (float)width + job->eps));
        for (int64_t i = 0; i < width; i += W)
            store_act(job->y + row * width + i, load_act(x + i) * scale * LOAD(vf, job->weight + i));
    }
}

INLINE vf gelu(vf x) { /* its tanh form */
    vf inner = splat(0.7978845608028654f) * fma_(splat(0.044715f) * x * x, x, x);
    return splat(0.5f) * x * (splat(1.0f) + tanh_(inner));
}

static void gate_rows(const void *shared, int64_t piece) {
    const Rows *job = shared;
    const int64_t width = job->width;
    int64_t end = (piece + 1) * ROWS_AT_ONCE;
    for (int64_t row = piece * ROWS_AT_ONCE; row < end && row < job->rows; row++) {
        const act *gates = job->x + row * 2 * width;
        for (int64_t i = 0; i < width; i += W) {
            vf gate = load_act(gates + i), up = load_act(gates + width + i);
            vf opened = job->kind ? gelu(gate) : gate / (splat(1.0f) + exp_(-gate));
            store_act(job->y + row * width + i, opened * up);
        }
    }
}

INLINE void run_rows(void (*run)(const void *, int64_t), const Rows *job, Team *team) {
    run_pieces(run, job, (job->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, team);
}

void norm(const Rows *job, Team *team) { run_rows(norm_rows, job, team); }
void gate(const Rows *job, Team *team) { run_rows(gate_rows, job, team); }

/* x [rows, width] += more, if that isn't NULL; y = x / sqrt(mean(x²) + eps) · weight. width % 16 = 0. */
API void pd_norm(void *x, const void *more, const float *weight, void *y, int64_t rows, int64_t width, float eps, int threads) {
    Rows job = {.x = x, .more = more, .weight = weight, .y = y, .rows = rows, .width = width, .eps = eps};
    TEAM(team, threads);
    norm(&job, &team);
}

/* y [rows, width] = silu(gate) · up, or gelu(gate) · up with kind 1, of x [rows, gate and up: 2 · width]. width % 16 = 0. */
API void pd_gate(const void *x, void *y, int64_t rows, int64_t width, int kind, int threads) {
    Rows job = {.x = (act *)x, .y = y, .rows = rows, .width = width, .kind = kind};
    TEAM(team, threads);
    gate(&job, &team);
}
