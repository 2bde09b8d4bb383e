/* What sampling looks for in a row of logits: whether all are finite, the largest, and those that filters leave. */
#include "threads.h"

#define STRETCH 2048 /* of a row whose largest is found before its place is: 8 KiB, still in the nearest cache */

typedef struct {
    const float *logits;
    int64_t width;
    int64_t *best;
    uint8_t *is_finite;
} Best;

static void best_of_row(const void *shared, int64_t row) {
    const Best *job = shared;
    const float *x = job->logits + row * job->width;
    const vu exponent = (vu)0x7f800000u;
    float highest = -__builtin_inff();
    int64_t best = 0;
    vi broken = (vi)0;
    for (int64_t begin = 0; begin < job->width; begin += STRETCH) {
        int64_t end = begin + STRETCH < job->width ? begin + STRETCH : job->width, i = begin;
        vf most = splat(-__builtin_inff());
        for (; i + W <= end; i += W) {
            vf value = LOAD(vf, x + i);
            broken |= (as_bits(value) & exponent) == exponent;
            most = max_(value, most);
        }
        float found = largest(most);
        for (; i < end; i++) {
            broken[0] |= -((__builtin_bit_cast(uint32_t, x[i]) & 0x7f800000u) == 0x7f800000u);
            found = x[i] > found ? x[i] : found;
        }
        if (found > highest) {
            highest = found;
            for (best = begin; x[best] != found;) best++;
        }
    }
    job->best[row] = best;
    job->is_finite[row] = !__builtin_reduce_or(broken);
}

/* Of each row of logits [rows, width]: best, the lowest index of its largest number; is_finite, whether every number is.
 * Where one isn't, best is any index. */
API void pd_best(const float *logits, int64_t rows, int64_t width, int64_t *best, uint8_t *is_finite, int threads) {
    Best job = {.logits = logits, .width = width, .best = best, .is_finite = is_finite};
    TEAM(team, threads);
    run_pieces(best_of_row, &job, rows, &team);
}

/* Integers in the order of finite floats, and back. */
INLINE uint64_t as_key(float x) {
    uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
INLINE float of_key(uint64_t key) {
    uint32_t bits = (uint32_t)key;
    return __builtin_bit_cast(float, bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

/* The k-th largest of n: the bytes of its key, one after the other. */
static float kth_of(const float *x, int64_t n, int64_t k) {
    uint64_t found = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t counts[256];
        for (int i = 0; i < 256; i++) counts[i] = 0;
        for (int64_t i = 0; i < n; i++) {
            uint64_t key = as_key(x[i]);
            if ((key ^ found) >> (shift + 8) == 0) counts[key >> shift & 255]++;
        }
        int byte = 255;
        for (; k > counts[byte]; byte--) k -= counts[byte];
        found |= (uint64_t)byte << shift;
    }
    return of_key(found);
}

/* As kth_of; room [2 · k]: the largest so far, cut back to k whenever it is full, so each costs a few operations whatever
 * order the row has. */
static float kth_of_row(const float *x, int64_t width, int64_t k, float *room) {
    int64_t count = 0;
    float least = -__builtin_inff(); /* what isn't larger can't change the result */
    for (int64_t begin = 0; begin < width; begin += W) {
        int64_t end = begin + W < width ? begin + W : width;
        if (end - begin == W && !__builtin_reduce_or(LOAD(vf, x + begin) > splat(least))) continue;
        for (int64_t i = begin; i < end; i++) {
            if (!(x[i] > least)) continue;
            room[count++] = x[i];
            if (count < 2 * k) continue;
            least = kth_of(room, count, k);
            int64_t kept = 0;
            for (int64_t j = 0; j < count; j++)
                if (room[j] > least) room[kept++] = room[j];
            for (count = kept; count < k;) room[count++] = least;
        }
    }
    return kth_of(room, count, k);
}

INLINE double scaled(float x, double highest, double temperature) { return ((double)x - highest) / temperature; }

/* Indices, ascending, of what is left of x [width], all finite: where left = (x − highest) / temperature, in float64, is
 * at least `lowest`, and at least the k-th largest left (k = 0: any).
 * lowest ≤ 0; 0 ≤ k ≤ width; room [2 · k]; ids, left [width], of which count are written. */
API void pd_shortlist(const float *x, int64_t width, double highest, double temperature, double lowest, int64_t k,
                      float *room, int64_t *ids, double *left, int64_t *count) {
    if (k) {
        double kth = scaled(kth_of_row(x, width, k, room), highest, temperature);
        lowest = kth > lowest ? kth : lowest;
    }
    /* Scaling keeps the order: the least float that is left, so that a row is only compared. */
    uint64_t begin = as_key(-__FLT_MAX__), end = as_key((float)highest);
    while (begin < end) {
        uint64_t middle = (begin + end) / 2;
        if (scaled(of_key(middle), highest, temperature) >= lowest) end = middle;
        else begin = middle + 1;
    }
    float least = of_key(begin);
    int64_t found = 0;
    for (int64_t from = 0; from < width; from += W) {
        int64_t to = from + W < width ? from + W : width;
        if (to - from == W && !__builtin_reduce_or(LOAD(vf, x + from) >= splat(least))) continue;
        for (int64_t i = from; i < to; i++) {
            if (x[i] < least) continue;
            ids[found] = i;
            left[found++] = scaled(x[i], highest, temperature);
        }
    }
    *count = found;
}
