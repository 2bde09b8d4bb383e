/* Quantised weights as files store them, taken apart where they lie: 16 rows at a time become lines that a product streams.
 *
 * A chunk is 256 values of a strip of 16 rows, in groups of 32. Of each group there are 8 lines of 64 bytes, of each row
 * four neighbouring values; a row's value is then scale · q + low, and both are the group's, or the half group's.
 *
 * Layouts of the blocks: see pdserve/engine/dequant.py, dequant_five.py and dequant_k.py.
 */
#pragma once
#include "vectors.h"

#define STRIP 16 /* rows */
#define GROUP 32
#define CHUNK 256
#define GROUPS (CHUNK / GROUP)
#define GROUP_LINES (GROUP / 4)
#define PARTS (STRIP / W) /* vectors of a line */

/* The numbers are those of packed.py. */
enum { Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

/* Products of bytes take unsigned weights where the CPU has an instruction for all 256 values of them; else those of Q8_0
 * stay signed, and no other exceeds 63. */
#if defined(__AVX512VNNI__)
#define BYTE_OFFSET 128
#else
#define BYTE_OFFSET 0
#endif

typedef struct {
    _Alignas(64) uint32_t lines[GROUPS][GROUP_LINES][STRIP];
    _Alignas(64) float scales[GROUPS][2][STRIP]; /* [1]: of the second half group, where it has its own */
    _Alignas(64) float lows[GROUPS][2][STRIP];
} Chunk;

typedef _Float16 vhalf __attribute__((ext_vector_type(W)));

/* W lanes from W rows, one each. */
#if W == 16
#define EACH_ROW(of) \
    { of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12), of(13), of(14), of(15) }
#elif W == 8
#define EACH_ROW(of) { of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7) }
#else
#define EACH_ROW(of) { of(0), of(1), of(2), of(3) }
#endif

INLINE vu words_at(const uint8_t *const *rows, int64_t at) {
#define WORD(i) LOAD(uint32_t, rows[i] + at)
    return (vu)EACH_ROW(WORD);
}
INLINE vf halves_at(const uint8_t *const *rows, int64_t at) {
#define HALF_WORD(i) LOAD(uint16_t, rows[i] + at)
    return __builtin_convertvector(__builtin_bit_cast(vhalf, (vh)EACH_ROW(HALF_WORD)), vf);
}
/* Two halves beside each other. */
INLINE vf first_half(vu words) {
    return __builtin_convertvector(__builtin_bit_cast(vhalf, __builtin_convertvector(words & 0xffff, vh)), vf);
}
INLINE vf second_half(vu words) { return first_half(words >> 16); }

/* Four neighbouring words of each of W rows, turned: column[c] has word c of every row. */
#if W == 16
#define TURN(a, b, p, q, r, s) \
    __builtin_shufflevector(a, b, p, q, r, s, p + 4, q + 4, r + 4, s + 4, p + 8, q + 8, r + 8, s + 8, p + 12, q + 12, r + 12, s + 12)
INLINE vu gathered(const uint8_t *const *rows, int64_t at) {
    u4 a = LOAD(u4, rows[0] + at), b = LOAD(u4, rows[4] + at), c = LOAD(u4, rows[8] + at), d = LOAD(u4, rows[12] + at);
    __typeof__(__builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7)) low = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7),
                                                                    high = __builtin_shufflevector(c, d, 0, 1, 2, 3, 4, 5, 6, 7);
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
#elif W == 8
#define TURN(a, b, p, q, r, s) __builtin_shufflevector(a, b, p, q, r, s, p + 4, q + 4, r + 4, s + 4)
INLINE vu gathered(const uint8_t *const *rows, int64_t at) {
    u4 a = LOAD(u4, rows[0] + at), b = LOAD(u4, rows[4] + at);
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7);
}
#else
#define TURN(a, b, p, q, r, s) __builtin_shufflevector(a, b, p, q, r, s)
INLINE vu gathered(const uint8_t *const *rows, int64_t at) { return LOAD(u4, rows[0] + at); }
#endif

INLINE void columns(const uint8_t *const *rows, int64_t at, vu column[4]) {
    vu a = gathered(rows, at), b = gathered(rows + 1, at), c = gathered(rows + 2, at), d = gathered(rows + 3, at);
    vu ab = TURN(a, b, 0, W, 1, W + 1), cd = TURN(c, d, 0, W, 1, W + 1);
    column[0] = TURN(ab, cd, 0, 1, W, W + 1);
    column[1] = TURN(ab, cd, 2, 3, W + 2, W + 3);
    ab = TURN(a, b, 2, W + 2, 3, W + 3), cd = TURN(c, d, 2, W + 2, 3, W + 3);
    column[2] = TURN(ab, cd, 0, 1, W, W + 1);
    column[3] = TURN(ab, cd, 2, 3, W + 2, W + 3);
}

#define LOW_BITS(n) (0x01010101u * ((1u << (n)) - 1))

/* Bits first … first + 3 of each word as the fifth bits of four bytes. */
INLINE vu fifth_bits(vu words, int first) { return (((words >> first) & 15) * 0x00204081u & LOW_BITS(1)) << 4; }

/* Blocks of 32 values: a group. `rows` are W of the strip's, `part` says which. */
INLINE void small_block(int kind, const uint8_t *const *rows, int64_t block, Chunk *to, int group, int part) {
    uint32_t(*lines)[STRIP] = to->lines[group];
    float *scale = to->scales[group][0] + part * W, *low = to->lows[group][0] + part * W;
    vu column[4];
    if (kind == Q8_0) {
        int64_t at = block * 34;
        for (int half = 0; half < 2; half++) {
            columns(rows, at + 2 + 16 * half, column);
            for (int c = 0; c < 4; c++)
                STORE(lines[4 * half + c] + part * W, column[c] ^ (BYTE_OFFSET ? 0x80808080u : 0));
        }
        vf d = halves_at(rows, at);
        STORE(scale, d);
        STORE(low, d * splat(-BYTE_OFFSET));
        return;
    }
    const int has_low = kind == Q4_1 || kind == Q5_1, has_fifth = kind == Q5_0 || kind == Q5_1;
    const int size = 18 + 2 * has_low + 4 * has_fifth;
    int64_t at = block * size;
    vu fifth = has_fifth ? words_at(rows, at + size - 20) : (vu)0;
    columns(rows, at + size - 16, column);
    for (int c = 0; c < 4; c++) {
        vu first = column[c] & LOW_BITS(4), second = column[c] >> 4 & LOW_BITS(4);
        if (has_fifth) first |= fifth_bits(fifth, 4 * c), second |= fifth_bits(fifth, 16 + 4 * c);
        STORE(lines[c] + part * W, first);
        STORE(lines[4 + c] + part * W, second);
    }
    if (has_low) {
        vu both = words_at(rows, at);
        STORE(scale, first_half(both));
        STORE(low, second_half(both));
        return;
    }
    vf d = halves_at(rows, at);
    STORE(scale, d);
    STORE(low, d * splat(has_fifth ? -16.0f : -8.0f));
}

/* Q4_K and Q5_K: a block is the whole chunk. */
INLINE void k_block(int kind, const uint8_t *const *rows, int64_t block, Chunk *to, int part) {
    const int has_fifth = kind == Q5_K;
    int64_t at = block * (has_fifth ? 176 : 144);
    vu both = words_at(rows, at), first = words_at(rows, at + 4), second = words_at(rows, at + 8), mixed = words_at(rows, at + 12);
    vf d = first_half(both), m = second_half(both);
    for (int group = 0; group < GROUPS; group++) {
        int shift = 8 * (group & 3);
        vu scale, low;
        if (group < 4)
            scale = first >> shift & 63, low = second >> shift & 63;
        else {
            scale = (mixed >> shift & 15) | (first >> (shift + 2) & 48);
            low = (mixed >> (shift + 4) & 15) | (second >> (shift + 2) & 48);
        }
        STORE(to->scales[group][0] + part * W, d * __builtin_convertvector(scale, vf));
        STORE(to->lows[group][0] + part * W, -(m * __builtin_convertvector(low, vf)));
    }
    for (int half = 0; half < 2; half++) {
        vu fifth[4], column[4];
        if (has_fifth) columns(rows, at + 16 + 16 * half, fifth);
        for (int pair = 0; pair < GROUPS / 2; pair++) {
            columns(rows, at + (has_fifth ? 48 : 16) + 32 * pair + 16 * half, column);
            for (int c = 0; c < 4; c++) {
                vu even = column[c] & LOW_BITS(4), odd = column[c] >> 4 & LOW_BITS(4);
                if (has_fifth) {
                    even |= (fifth[c] >> (2 * pair) & LOW_BITS(1)) << 4;
                    odd |= (fifth[c] >> (2 * pair + 1) & LOW_BITS(1)) << 4;
                }
                STORE(to->lines[2 * pair][4 * half + c] + part * W, even);
                STORE(to->lines[2 * pair + 1][4 * half + c] + part * W, odd);
            }
        }
    }
}

INLINE void q6_k_block(const uint8_t *const *rows, int64_t block, Chunk *to, int part) {
    int64_t at = block * 210;
    vf d = halves_at(rows, at + 208);
    for (int quarter = 0; quarter < 4; quarter++) {
        vi scales = (vi)words_at(rows, at + 192 + 4 * quarter);
        for (int i = 0; i < 4; i++) { /* of half groups */
            vf scale = d * __builtin_convertvector(scales << (24 - 8 * i) >> 24, vf);
            STORE(to->scales[2 * quarter + i / 2][i % 2] + part * W, scale);
            STORE(to->lows[2 * quarter + i / 2][i % 2] + part * W, scale * splat(-32.0f));
        }
    }
    for (int half = 0; half < 2; half++) /* of the block */
        for (int piece = 0; piece < 2; piece++) { /* 16 of each 32 values */
            vu upper[4], left[4], right[4];
            columns(rows, at + 128 + 32 * half + 16 * piece, upper);
            columns(rows, at + 64 * half + 16 * piece, left);
            columns(rows, at + 64 * half + 32 + 16 * piece, right);
            for (int c = 0; c < 4; c++) {
                uint32_t(*lines)[GROUP_LINES][STRIP] = to->lines + 4 * half;
                int line = 4 * piece + c;
                STORE(lines[0][line] + part * W, (left[c] & LOW_BITS(4)) | (upper[c] & LOW_BITS(2)) << 4);
                STORE(lines[1][line] + part * W, (right[c] & LOW_BITS(4)) | (upper[c] >> 2 & LOW_BITS(2)) << 4);
                STORE(lines[2][line] + part * W, (left[c] >> 4 & LOW_BITS(4)) | (upper[c] >> 4 & LOW_BITS(2)) << 4);
                STORE(lines[3][line] + part * W, (right[c] >> 4 & LOW_BITS(4)) | (upper[c] >> 6 & LOW_BITS(2)) << 4);
            }
        }
}

/* The rows that will be taken apart next, fetched a few lines at a time: many at once would hold up the reads of now. */
typedef struct {
    const uint8_t *const *rows;
    int64_t row_bytes, row, at;
} Ahead;

INLINE void fetch(Ahead *ahead, int num_lines) {
    for (; num_lines && ahead->row < STRIP; num_lines--) {
        __builtin_prefetch(ahead->rows[ahead->row] + ahead->at, 0, 2);
        ahead->at += 64;
        if (ahead->at >= ahead->row_bytes) ahead->at = 0, ahead->row++;
    }
}

/* A chunk of 16 rows: values 256 · chunk and on, so many groups of them. */
INLINE void take_apart(int kind, const uint8_t *const *rows, int64_t chunk, int num_groups, Ahead *ahead, Chunk *to) {
    for (int part = 0; part < PARTS; part++) {
        const uint8_t *const *own = rows + part * W;
        if (kind == Q6_K)
            q6_k_block(own, chunk, to, part);
        else if (kind == Q4_K || kind == Q5_K)
            k_block(kind, own, chunk, to, part);
        if (kind >= Q4_K) {
            fetch(ahead, 16 * GROUPS / PARTS);
            continue;
        }
        for (int group = 0; group < num_groups; group++) {
            small_block(kind, own, chunk * GROUPS + group, to, group, part);
            fetch(ahead, 10 / PARTS);
        }
    }
}
