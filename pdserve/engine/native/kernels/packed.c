/* y = x · Wᵀ + b by weights as they are stored in a file, 4 to 8 bits wide, and 8-bit activations.
 *
 * A row of x becomes bytes once a product, in groups of 32 with a scale each; products of bytes are summed exactly, group
 * by group, and the groups in one order, whatever the number of rows is: there is no other arithmetic for many of them.
 * Each thread takes apart a chunk of 16 rows of weights (stored.h) in its nearest cache and multiplies all rows of x by it.
 */
#include "kernels.h"
#include "stored.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define HELD_ROWS 96 /* of x, whose sums a thread holds while it goes through the chunks */
#if W == 16
#define ROWS 12
#elif W == 8
#define ROWS 6
#else
#define ROWS 4
#endif

/* 32 activations: value = scale · q; sum = scale · Σq. */
struct Activations {
    int8_t q[GROUP];
    float scale, sum, half_sums[2];
};

static void quantise_row(const void *shared, int64_t row) {
    const Packed *job = shared;
    const act *x = job->x + row * job->width;
    Activations *to = job->quantised + row * (job->width / GROUP);
    for (int64_t group = 0; group < job->width / GROUP; group++, x += GROUP, to++) {
        vf values[GROUP / W];
        vu highest = {0}; /* as bits: those of a NaN are above all others, so it makes the scale and the results NaN */
        for (int i = 0; i < GROUP / W; i++) {
            values[i] = load_act(x + i * W);
            highest = __builtin_elementwise_max(highest, as_bits(__builtin_elementwise_abs(values[i])));
        }
        float most = __builtin_bit_cast(float, __builtin_reduce_max(highest));
        float inverse = most > 0.0f ? 127.0f / most : 0.0f;
        int sums[2] = {0, 0};
        for (int i = 0; i < GROUP / W; i++) {
            vf scaled = __builtin_elementwise_roundeven(values[i] * splat(inverse));
            vi q = __builtin_convertvector(select_(__builtin_elementwise_abs(scaled) <= splat(127.0f), scaled, splat(0.0f)), vi);
            sums[i * W / 16] += __builtin_reduce_add(q);
            typedef int8_t vb __attribute__((ext_vector_type(W)));
            STORE(to->q + i * W, __builtin_convertvector(q, vb));
        }
        to->scale = most / 127.0f;
        to->sum = to->scale * (float)(sums[0] + sums[1]);
        to->half_sums[0] = to->scale * (float)sums[0];
        to->half_sums[1] = to->scale * (float)sums[1];
    }
}

/* sum += the four products of bytes in each lane. */
INLINE vi add_products(vi sum, vu weights, uint32_t x, int is_signed) {
#if defined(__AVX512VNNI__)
    (void)is_signed;
    return __builtin_bit_cast(vi, _mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32((int)x)));
#elif W == 16
    __m512i w = (__m512i)weights, bytes = _mm512_set1_epi32((int)x);
    if (is_signed) {
        bytes = _mm512_mask_sub_epi8(bytes, _mm512_movepi8_mask(w), _mm512_setzero_si512(), bytes);
        w = _mm512_abs_epi8(w);
    }
    return sum + __builtin_bit_cast(vi, _mm512_madd_epi16(_mm512_maddubs_epi16(w, bytes), _mm512_set1_epi16(1)));
#elif W == 8
    __m256i w = (__m256i)weights, bytes = _mm256_set1_epi32((int)x);
    if (is_signed) {
        bytes = _mm256_sign_epi8(bytes, w);
        w = _mm256_abs_epi8(w);
    }
    return sum + __builtin_bit_cast(vi, _mm256_madd_epi16(_mm256_maddubs_epi16(w, bytes), _mm256_set1_epi16(1)));
#else
    (void)is_signed;
    int8x16_t w = vreinterpretq_s8_u32(weights), bytes = vreinterpretq_s8_u32(vdupq_n_u32(x));
    int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(bytes)), high = vmull_s8(vget_high_s8(w), vget_high_s8(bytes));
    return vpadalq_s16(sum, vpaddq_s16(low, high));
#endif
}

/* Unrolled, or the sums would go through memory. */
#define EACH_OF(num) _Pragma("clang loop unroll(full)") for (int j = 0; j < (num); j++)

/* Add num_groups of a chunk to num_rows rows of sums, [row][16]. `part` of each line. */
INLINE void multiply(int kind, const Chunk *chunk, int num_groups, const Activations *x, int64_t stride, int num_rows, int part,
                     float (*sums)[STRIP]) {
    const int has_halves = kind == Q6_K, is_signed = kind == Q8_0;
    vf acc[ROWS];
    EACH_OF(num_rows) acc[j] = LOAD(vf, sums[j] + part * W);
    for (int group = 0; group < num_groups; group++) {
        vu line[GROUP_LINES];
        for (int i = 0; i < GROUP_LINES; i++) line[i] = LOAD(vu, chunk->lines[group][i] + part * W);
        vf scale = LOAD(vf, chunk->scales[group][0] + part * W), low = LOAD(vf, chunk->lows[group][0] + part * W);
        EACH_OF(num_rows) {
            const Activations *own = x + j * stride + group;
            vi sum = (vi)0, second = (vi)0;
            for (int i = 0; i < GROUP_LINES / 2; i++) {
                sum = add_products(sum, line[i], LOAD(uint32_t, own->q + 4 * i), is_signed);
                second = add_products(second, line[4 + i], LOAD(uint32_t, own->q + 16 + 4 * i), is_signed);
            }
            if (has_halves) {
                vf other_scale = LOAD(vf, chunk->scales[group][1] + part * W), other_low = LOAD(vf, chunk->lows[group][1] + part * W);
                vf products = fma_(__builtin_convertvector(second, vf), other_scale, __builtin_convertvector(sum, vf) * scale);
                acc[j] = fma_(products, splat(own->scale), acc[j]);
                acc[j] = fma_(low, splat(own->half_sums[0]), acc[j]);
                acc[j] = fma_(other_low, splat(own->half_sums[1]), acc[j]);
                continue;
            }
            acc[j] = fma_(__builtin_convertvector(sum + second, vf) * scale, splat(own->scale), acc[j]);
            if (kind != Q8_0 || BYTE_OFFSET != 0) acc[j] = fma_(low, splat(own->sum), acc[j]);
        }
    }
    EACH_OF(num_rows) STORE(sums[j] + part * W, acc[j]);
}

#define CASE(n) \
    case n: multiply(kind, chunk, num_groups, x, stride, n, part, sums); break;

INLINE void multiply_rows(int kind, const Chunk *chunk, int num_groups, const Activations *x, int64_t stride, int64_t num_rows,
                          float (*sums)[STRIP]) {
    for (int64_t row = 0; row < num_rows; row += ROWS, x += ROWS * stride, sums += ROWS)
        for (int part = 0; part < PARTS; part++) switch (num_rows - row < ROWS ? (int)(num_rows - row) : ROWS) {
                CASE(1) CASE(2) CASE(3) CASE(4)
#if ROWS > 4
                CASE(5) CASE(6)
#endif
#if ROWS > 6
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
}

static const int64_t BLOCK_BYTES[] = {34, 18, 20, 22, 24, 144, 176, 210};

INLINE void strip(int kind, const Packed *job, const Segment *segment, int64_t first, int64_t column) {
    const int64_t num_groups = job->width / GROUP, left = segment->outputs - first;
    const uint8_t *const *rows = segment->rows + first, *const *next = left > STRIP ? rows + STRIP : rows;
    const int64_t chunk_bytes = BLOCK_BYTES[kind] * (kind >= Q4_K ? 1 : GROUPS);
    Chunk chunk;
    float sums[HELD_ROWS][STRIP];
    Ahead ahead = {next, num_groups * chunk_bytes / GROUPS, left > STRIP ? 0 : STRIP, 0};
    for (int64_t row = 0; row < job->rows; row += HELD_ROWS) {
        int64_t num_rows = job->rows - row < HELD_ROWS ? job->rows - row : HELD_ROWS;
        const Activations *x = job->quantised + row * num_groups;
        for (int64_t j = 0; j < num_rows; j++)
            for (int i = 0; i < STRIP; i += W) STORE(sums[j] + i, splat(0.0f));
        for (int64_t group = 0; group < num_groups; group += GROUPS) {
            int num = num_groups - group < GROUPS ? (int)(num_groups - group) : GROUPS;
            take_apart(kind, rows, group / GROUPS, num, &ahead, &chunk);
            multiply_rows(kind, &chunk, num, x + group, num_groups, num_rows, sums);
        }
        for (int64_t j = 0; j < num_rows; j++)
            for (int i = 0; i < STRIP && i < left; i++) {
                int64_t at = column + i;
                job->y[(row + j) * job->outputs + at] = as_act(job->bias ? sums[j][i] + job->bias[at] : sums[j][i]);
            }
    }
}

static void run_strip(const void *shared, int64_t piece) {
    const Packed *job = shared;
    int64_t column = 0;
    for (const Segment *segment = job->segments;; segment++) {
        int64_t strips = (segment->outputs + STRIP - 1) / STRIP;
        if (piece >= strips) {
            piece -= strips;
            column += segment->outputs;
            continue;
        }
        column += piece * STRIP;
        switch (segment->kind) {
#define KIND(kind) \
    case kind: strip(kind, job, segment, piece * STRIP, column); return;
            KIND(Q8_0) KIND(Q4_0) KIND(Q4_1) KIND(Q5_0) KIND(Q5_1) KIND(Q4_K) KIND(Q5_K) KIND(Q6_K)
        }
        return;
    }
}

void packed_linear(const Packed *job, Team *team) {
    int64_t strips = 0;
    for (int64_t i = 0; i < job->num_segments; i++) strips += (job->segments[i].outputs + STRIP - 1) / STRIP;
    run_small_pieces(quantise_row, job, job->rows, team);
    run_pieces(run_strip, job, strips, team);
}

/* x [rows, width] activations; quantised: room for rows · width / 32 of Activations; bias [outputs] or NULL; y [rows,
 * outputs]: the segments' side by side. width is a multiple of 32, of 256 for K-quants. */
API void pd_packed_linear(const void *x, void *quantised, const Segment *segments, const float *bias, void *y, int64_t num_segments,
                          int64_t rows, int64_t outputs, int64_t width, int threads) {
    Packed job = {x, quantised, segments, bias, y, num_segments, rows, outputs, width};
    TEAM(team, threads);
    packed_linear(&job, &team);
}
