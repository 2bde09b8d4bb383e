/* Attention of one layer over the paged pool: K and V are read where they lie.
 *
 *     pool     [blocks, kv heads, layers, 2, block size, head dim] bfloat16
 *     a task   some tokens of one sequence; a piece of it is one KV head: its rows are tokens × the query heads of that
 *     keys     in tiles of KEYS at absolute positions, packed once a task; tiles in spans of SPAN, each with a softmax of
 *              its own, which are then merged in order
 *
 * So the work on a long context can be shared among threads, and what a row gives doesn't depend on how it was cut: a
 * token computed alone, in a chunk, or beside others meets the same tiles, spans and order of adding. A key that a row
 * doesn't see adds exact zeros.
 */
#include "kernels.h"

#define KEYS 64
#define SPAN 256
#define ROWS 4
#define MAX_ROWS 128
#define MAX_DIM 256
#define NEVER (-1e30f) /* below any score; finite, so that differences are numbers */
#if W == 8
#define COLUMNS 2 /* vectors of sums a row */
#else
#define COLUMNS 4
#endif

INLINE uint16_t *run_of(const Step *step, int64_t layer, int64_t block, int64_t kv_head, int is_value) {
    int64_t run = ((block * step->kv_heads + kv_head) * step->layers + layer) * 2 + is_value;
    return step->pool + run * step->block_size * step->head_dim;
}

/* --- queries and keys are normalised and turned, keys and values stored */

#if W == 16
#define EVEN 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14
#define ODD 1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#elif W == 8
#define EVEN 0, 0, 2, 2, 4, 4, 6, 6
#define ODD 1, 1, 3, 3, 5, 5, 7, 7
#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6
#else
#define EVEN 0, 0, 2, 2
#define ODD 1, 1, 3, 3
#define SWAPPED 1, 0, 3, 2
#endif

INLINE vf turned(vf pairs, vf turn) {
    vf cosine = __builtin_shufflevector(turn, turn, EVEN), sine = __builtin_shufflevector(turn, turn, ODD);
    vu sign;
    for (int i = 0; i < W; i++) sign[i] = i % 2 ? 0 : 1u << 31;
    vf signed_sine = as_floats(as_bits(sine) ^ sign);
    return fma_(__builtin_shufflevector(pairs, pairs, SWAPPED), signed_sine, pairs * cosine);
}

static void turn_token(const Layer *job, int64_t token) {
    const Step *step = job->step;
    const int64_t dim = step->head_dim, heads = step->kv_heads * step->group, turning = heads + step->kv_heads;
    const act *row = job->projected + token * (turning + step->kv_heads) * dim;
    const float *turns = job->turns + token * dim;
    int64_t block = step->slots[token] / step->block_size, offset = step->slots[token] % step->block_size;
    for (int64_t head = 0; head < turning; head++) {
        float scale = 1.0f;
        if (job->norm) {
            vf squares = splat(0.0f);
            for (int64_t d = 0; d < dim; d += W) {
                vf x = load_act(row + head * dim + d);
                squares = fma_(x, x, squares);
            }
            scale = 1.0f / __builtin_sqrtf(sum(squares) / (float)dim + job->eps);
        }
        uint16_t *key = run_of(step, job->layer, block, head - heads, 0) + offset * dim;
        act *query = step->queries + (token * heads + head) * dim;
        for (int64_t d = 0; d < dim; d += W) {
            vf x = load_act(row + head * dim + d);
            if (job->norm) x = x * splat(scale) * LOAD(vf, job->norm + head * dim + d);
            x = turned(x, LOAD(vf, turns + d));
            if (head < heads)
                store_act(query + d, x);
            else
                STORE(key + d, narrow(x));
        }
    }
    for (int64_t head = 0; head < step->kv_heads; head++) {
        uint16_t *value = run_of(step, job->layer, block, head, 1) + offset * dim;
        for (int64_t d = 0; d < dim; d += W) STORE(value + d, narrow(load_act(row + (turning + head) * dim + d)));
    }
}

#define TOKENS_AT_ONCE 8

static void turn_tokens(const void *shared, int64_t piece) {
    const Layer *job = shared;
    int64_t end = (piece + 1) * TOKENS_AT_ONCE;
    if (end > job->step->num_tokens) end = job->step->num_tokens;
    for (int64_t token = piece * TOKENS_AT_ONCE; token < end; token++) turn_token(job, token);
}

/* --- a tile of keys and values, packed into lines as `product` wants them */

typedef struct {
    uint32_t keys[MAX_DIM / 2 * KEYS];   /* [head dim / 2][KEYS] */
    uint32_t values[KEYS / 2 * MAX_DIM]; /* [KEYS / 2][head dim] */
} Tile;

static const uint16_t zeros[MAX_DIM];

static void pack_tile(const Layer *job, const Task *task, int64_t kv_head, int64_t key, int num_keys, Tile *tile) {
    const Step *step = job->step;
    const int64_t dim = step->head_dim, size = step->block_size;
    const uint16_t *keys[KEYS], *values[KEYS];
    for (int i = 0; i < KEYS; i++) {
        if (i >= num_keys) {
            keys[i] = values[i] = zeros;
            continue;
        }
        int64_t block = step->tables[task->table + (key + i) / size], offset = (key + i) % size * dim;
        keys[i] = run_of(step, job->layer, block, kv_head, 0) + offset;
        values[i] = keys[i] + size * dim;
    }
    for (int i = 0; i < KEYS; i += 4) {
        for (int64_t pair = 0; pair < dim / 2; pair += 4) {
            u4 a = LOAD(u4, keys[i] + 2 * pair), b = LOAD(u4, keys[i + 1] + 2 * pair);
            u4 c = LOAD(u4, keys[i + 2] + 2 * pair), d = LOAD(u4, keys[i + 3] + 2 * pair);
            u4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5), ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            u4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5), cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            uint32_t *to = tile->keys + pair * KEYS + i;
            STORE(to, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
            STORE(to + KEYS, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
            STORE(to + 2 * KEYS, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
            STORE(to + 3 * KEYS, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
        }
    }
    for (int i = 0; i < KEYS; i += 2)
        for (int64_t d = 0; d < dim; d += W) {
            vu even = __builtin_convertvector(LOAD(vh, values[i] + d), vu);
            vu odd = __builtin_convertvector(LOAD(vh, values[i + 1] + d), vu);
            STORE(tile->values + i / 2 * dim + d, even | odd << 16);
        }
}

/* --- rows against a tile */

typedef struct {
    float sums[MAX_ROWS * MAX_DIM];
    float most[MAX_ROWS], total[MAX_ROWS];
} State;

typedef struct {
    const act *query;
    int64_t position;
} Row;

INLINE void scores_of(const Layer *job, int num_rows, const Row *rows, const Tile *tile, int64_t key, float scores[ROWS][KEYS]) {
    const Step *step = job->step;
    for (int k = 0; k < KEYS; k += COLUMNS * W) {
        vf acc[ROWS][COLUMNS];
        for (int r = 0; r < num_rows; r++)
            for (int c = 0; c < COLUMNS; c++) acc[r][c] = splat(0.0f);
        for (int64_t pair = 0; pair < step->head_dim / 2; pair++) {
            vu lines[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) lines[c] = LOAD(vu, tile->keys + pair * KEYS + k + c * W);
            for (int r = 0; r < num_rows; r++) {
                x_pair x = load_pair(rows[r].query + 2 * pair);
                for (int c = 0; c < COLUMNS; c++) acc[r][c] = product(acc[r][c], lines[c], x);
            }
        }
        for (int r = 0; r < num_rows; r++)
            for (int c = 0; c < COLUMNS; c++) {
                vf score = acc[r][c];
                if (step->softcap)
                    score = tanh_(score * splat(step->scale / step->softcap)) * splat(step->softcap);
                else
                    score = score * splat(step->scale);
                STORE(scores[r] + k + c * W, score);
            }
    }
    for (int r = 0; r < num_rows; r++) {
        int64_t last = rows[r].position - key, first = job->view->window ? last - job->view->window + 1 : 0;
        for (int64_t k = last + 1 < 0 ? 0 : last + 1; k < KEYS; k++) scores[r][k] = -__builtin_inff();
        for (int64_t k = 0; k < first && k < KEYS; k++) scores[r][k] = -__builtin_inff();
    }
}

/* Scores as weights, relative to the largest so far; what the sums so far are to be multiplied by. */
INLINE float weigh(const float *scores, act *weights, float *most, float *total) {
    vf high = splat(*most);
    for (int k = 0; k < KEYS; k += W) high = max_(LOAD(vf, scores + k), high);
    float new_most = largest(high);
    float scale = exp_(splat(*most - new_most))[0];
    vf added = splat(0.0f);
    for (int k = 0; k < KEYS; k += W) {
        vf weight = exp_(LOAD(vf, scores + k) - splat(new_most));
        added += weight;
        store_act(weights + k, weight);
    }
    *most = new_most;
    *total = __builtin_fmaf(*total, scale, sum(added));
    return scale;
}

INLINE void add_values(int num_rows, int num_columns, const Tile *tile, int num_keys, int64_t dim, int64_t d,
                       const act weights[ROWS][KEYS], const float *scales, float *sums) {
    vf acc[ROWS][COLUMNS];
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_columns; c++) acc[r][c] = LOAD(vf, sums + r * dim + d + c * W) * splat(scales[r]);
    for (int pair = 0; 2 * pair < num_keys; pair++) {
        vu lines[COLUMNS];
        for (int c = 0; c < num_columns; c++) lines[c] = LOAD(vu, tile->values + pair * dim + d + c * W);
        for (int r = 0; r < num_rows; r++) {
            x_pair x = load_pair(weights[r] + 2 * pair);
            for (int c = 0; c < num_columns; c++) acc[r][c] = product(acc[r][c], lines[c], x);
        }
    }
    for (int r = 0; r < num_rows; r++)
        for (int c = 0; c < num_columns; c++) STORE(sums + r * dim + d + c * W, acc[r][c]);
}

INLINE void meet(const Layer *job, int num_rows, const Row *rows, const Tile *tile, int64_t key, int num_keys, State *state,
                 int64_t row) {
    float scores[ROWS][KEYS], scales[ROWS];
    act weights[ROWS][KEYS];
    int64_t dim = job->step->head_dim, d = 0;
    scores_of(job, num_rows, rows, tile, key, scores);
    for (int r = 0; r < num_rows; r++)
        scales[r] = weigh(scores[r], weights[r], state->most + row + r, state->total + row + r);
    float *sums = state->sums + row * dim;
    for (; d + COLUMNS * W <= dim; d += COLUMNS * W)
        add_values(num_rows, COLUMNS, tile, num_keys, dim, d, weights, scales, sums);
    for (; d < dim; d += W) add_values(num_rows, 1, tile, num_keys, dim, d, weights, scales, sums);
}

static void meet_tile(const Layer *job, const Row *rows, int64_t num_rows, const Tile *tile, int64_t key,
                      int num_keys, State *state) {
    for (int64_t row = 0; row < num_rows; row += ROWS) {
        int64_t left = num_rows - row < ROWS ? num_rows - row : ROWS;
        if (rows[row + left - 1].position < key) continue; /* none of them sees any */
        if (job->view->window && rows[row].position - job->view->window >= key + KEYS - 1) continue;
        switch (left) {
        case 1: meet(job, 1, rows + row, tile, key, num_keys, state, row); break;
        case 2: meet(job, 2, rows + row, tile, key, num_keys, state, row); break;
        case 3: meet(job, 3, rows + row, tile, key, num_keys, state, row); break;
        default: meet(job, 4, rows + row, tile, key, num_keys, state, row); break;
        }
    }
}

/* The softmax of a first part, then of what follows it, as one. */
INLINE void join(float *sums, float *most, float *total, const float *more, float more_most, float more_total, int64_t dim) {
    float new_most = *most > more_most ? *most : more_most;
    float scale = exp_(splat(*most - new_most))[0], more_scale = exp_(splat(more_most - new_most))[0];
    for (int64_t d = 0; d < dim; d += W)
        STORE(sums + d, fma_(LOAD(vf, more + d), splat(more_scale), LOAD(vf, sums + d) * splat(scale)));
    *total = __builtin_fmaf(more_total, more_scale, *total * scale);
    *most = new_most;
}

INLINE void store_out(act *out, const float *sums, float total, int64_t dim) {
    for (int64_t d = 0; d < dim; d += W) store_act(out + d, LOAD(vf, sums + d) / splat(total));
}

INLINE void begin(State *state, int64_t num_rows, int64_t dim) {
    for (int64_t i = 0; i < num_rows * dim; i += W) STORE(state->sums + i, splat(0.0f));
    for (int64_t row = 0; row < num_rows; row++) state->most[row] = NEVER, state->total[row] = 0.0f;
}

static void attend_task(const void *shared, int64_t piece) {
    const Layer *job = shared;
    const Step *step = job->step;
    const Task *task = job->view->tasks + piece / step->kv_heads;
    const int64_t kv_head = piece % step->kv_heads;
    const int64_t dim = step->head_dim, group = step->group, heads = group * step->kv_heads;
    const int64_t num_rows = task->num_tokens * group;
    Tile tile;
    State whole, part;
    Row rows[MAX_ROWS];
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t token = row / group, head = kv_head * group + row % group;
        rows[row] = (Row){step->queries + ((task->first_row + token) * heads + head) * dim, task->position + token};
    }
    int is_first = 1;
    for (int64_t span = task->begin / SPAN * SPAN; span < task->end; span += SPAN) {
        State *state = is_first ? &whole : &part;
        begin(state, num_rows, dim);
        int64_t key = span > task->begin ? span : task->begin / KEYS * KEYS;
        int64_t end = span + SPAN < task->end ? span + SPAN : task->end;
        for (; key < end; key += KEYS) {
            int num_keys = end - key < KEYS ? (int)(end - key) : KEYS;
            pack_tile(job, task, kv_head, key, num_keys, &tile);
            meet_tile(job, rows, num_rows, &tile, key, num_keys, state);
        }
        if (!is_first)
            for (int64_t row = 0; row < num_rows; row++)
                join(whole.sums + row * dim, whole.most + row, whole.total + row, part.sums + row * dim, part.most[row],
                     part.total[row], dim);
        is_first = 0;
    }
    for (int64_t row = 0; row < num_rows; row++) {
        const float *sums = whole.sums + row * dim;
        if (task->partial < 0) {
            int64_t token = task->first_row + row / group, head = kv_head * group + row % group;
            store_out(job->out + (token * heads + head) * dim, sums, whole.total[row], dim);
            continue;
        }
        float *to = step->partials + (task->partial * heads + kv_head * group + row) * (dim + 2);
        for (int64_t d = 0; d < dim; d += W) STORE(to + d, LOAD(vf, sums + d));
        to[dim] = whole.most[row];
        to[dim + 1] = whole.total[row];
    }
}

static void merge(const void *shared, int64_t piece) {
    const Layer *job = shared;
    const Step *step = job->step;
    const Merge *merge = job->view->merges + piece / step->kv_heads;
    const int64_t kv_head = piece % step->kv_heads;
    const int64_t dim = step->head_dim, group = step->group, heads = group * step->kv_heads, stride = heads * (dim + 2);
    for (int64_t row = kv_head * group; row < (kv_head + 1) * group; row++) {
        float *sums = step->partials + merge->first_partial * stride + row * (dim + 2);
        float most = sums[dim], total = sums[dim + 1];
        for (int64_t i = 1; i < merge->num_partials; i++) {
            const float *more = sums + i * stride;
            join(sums, &most, &total, more, more[dim], more[dim + 1], dim);
        }
        store_out(job->out + (merge->row * heads + row) * dim, sums, total, dim);
    }
}

/* The layer's K and V of the step's tokens are stored, then all tasks run. head dim is a multiple of 16, at most MAX_DIM;
 * the rows of a task are at most MAX_ROWS. Blocks hold finite numbers in each position below a task's end. */
void attend(const Layer *job, Team *team) {
    int64_t kv_heads = job->step->kv_heads;
    run_pieces(turn_tokens, job, (job->step->num_tokens + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, team);
    run_pieces(attend_task, job, job->view->num_tasks * kv_heads, team);
    run_small_pieces(merge, job, job->view->num_merges * kv_heads, team);
}

API void pd_attend(const Step *step, const View *view, int64_t layer, const void *projected, const float *turns, const float *norm,
                   float eps, void *out, int threads) {
    Layer job = {step, view, projected, turns, norm, out, layer, eps};
    TEAM(team, threads);
    attend(&job, &team);
}
