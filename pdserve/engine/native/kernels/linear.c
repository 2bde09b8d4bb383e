/* y = x · Wᵀ + b. The weights are bfloat16, packed so that they are read in one stream and sums stay apart:
 *
 *     [outputs / 16][width / 2][16][2]     a line of 64 bytes: of 16 outputs, two neighbours along the width each
 *
 * A tile is ROWS rows of x by BLOCKS blocks of outputs: each line meets a pair of x, broadcast, and is added to one sum
 * an output, pair after pair. The order is the same whatever the rows are. A pair of blocks is read from memory once for
 * all rows, while the lines of the next pair are fetched.
 */
#include "kernels.h"

#define BLOCK 16 /* outputs */
#define BLOCKS 2
#define LANES (BLOCK / W)
/* As many sums as registers hold; a few rows take both blocks at once, since their sums would else wait for each other. */
#if W == 16
#define ROWS 12
#define FEW_ROWS 12
#else
#define ROWS 6
#define FEW_ROWS 3
#endif

INLINE void store_block(const Linear *job, int64_t row, int64_t output, const vf *acc) {
    act *y = job->y + row * job->outputs;
    int64_t left = job->outputs - output;
    for (int lane = 0; lane < LANES; lane++) {
        vf value = acc[lane];
        int64_t at = output + lane * W, num = left - lane * W;
        if (num >= W) {
            if (job->bias) value += LOAD(vf, job->bias + at);
            store_act(y + at, value);
            continue;
        }
        for (int i = 0; i < num; i++) {
            y[at + i] = as_act(job->bias ? value[i] + job->bias[at + i] : value[i]);
        }
    }
}

INLINE void tile(const Linear *job, int num_rows, int num_blocks, int64_t row, int64_t block, int is_first) {
    const int64_t width = job->width, num_pairs = width / 2;
    const act *x = job->x + row * width;
    const uint32_t *w = job->w + block * num_pairs * BLOCK;
    const uint32_t *ahead = w + BLOCKS * num_pairs * BLOCK; /* a prefetch behind the end does no harm */
    vf acc[ROWS][BLOCKS][LANES];
    for (int j = 0; j < num_rows; j++)
        for (int b = 0; b < num_blocks; b++)
            for (int lane = 0; lane < LANES; lane++) acc[j][b][lane] = splat(0.0f);
    for (int64_t k = 0; k < num_pairs; k++) {
        vu weights[BLOCKS][LANES];
        for (int b = 0; b < num_blocks; b++)
            for (int lane = 0; lane < LANES; lane++)
                weights[b][lane] = LOAD(vu, w + (b * num_pairs + k) * BLOCK + lane * W);
        if (is_first) {
            __builtin_prefetch(ahead + 2 * k * BLOCK, 0, 3);
            __builtin_prefetch(ahead + (2 * k + 1) * BLOCK, 0, 3);
        }
        for (int j = 0; j < num_rows; j++) {
            x_pair pair = load_pair(x + j * width + 2 * k);
            for (int b = 0; b < num_blocks; b++)
                for (int lane = 0; lane < LANES; lane++)
                    acc[j][b][lane] = product(acc[j][b][lane], weights[b][lane], pair);
        }
    }
    for (int j = 0; j < num_rows; j++)
        for (int b = 0; b < num_blocks; b++) store_block(job, row + j, (block + b) * BLOCK, acc[j][b]);
}

INLINE void tiles(const Linear *job, int num_rows, int64_t row, int64_t block, int is_first) {
    if (num_rows <= FEW_ROWS) {
        tile(job, num_rows, BLOCKS, row, block, is_first);
        return;
    }
    for (int b = 0; b < BLOCKS; b++) tile(job, num_rows, 1, row, block + b, is_first && b == 0);
}

#define CASE(n) \
    case n: tiles(job, n, row, block, is_first); break;

static void rows_tile(const Linear *job, int64_t row, int64_t block, int is_first) {
    int64_t left = job->rows - row;
    switch (left < ROWS ? (int)left : ROWS) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
}

static void run_linear(const void *shared, int64_t piece) {
    const Linear *job = shared;
    for (int64_t row = 0; row < job->rows; row += ROWS) rows_tile(job, row, piece * BLOCKS, row == 0);
}

void linear(const Linear *job, Team *team) {
    run_pieces(run_linear, job, (job->outputs + BLOCKS * BLOCK - 1) / (BLOCKS * BLOCK), team);
}

/* x [rows, width] activations; w packed, outputs padded to a multiple of 32; bias [outputs] or NULL; y [rows, outputs]
 * activations. width is even. */
API void pd_linear(const void *x, const void *w, const float *bias, void *y, int64_t rows, int64_t outputs,
                   int64_t width, int threads) {
    Linear job = {x, w, bias, y, rows, outputs, width};
    TEAM(team, threads);
    linear(&job, &team);
}
