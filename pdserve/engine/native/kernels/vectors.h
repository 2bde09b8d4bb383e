/* Vectors of one instruction set, from clang's vector extensions: the kernels are written once and compiled once for
 * each set (variants.txt). A variant with bfloat16 products keeps activations in bfloat16, any other in float32.
 *
 * Nothing here depends on how many rows a kernel works on, and no sum is reordered by the compiler (-ffp-contract=off,
 * no fast-math): what a row gives is the same bits whoever shares the call.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define W 16
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif

#if defined(__AVX512BF16__)
#include <immintrin.h>
#define BF16_PRODUCTS 1
typedef uint16_t act;
#else
#define BF16_PRODUCTS 0
typedef float act;
#endif

#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((ext_vector_type(W)));
typedef uint32_t vu __attribute__((ext_vector_type(W)));
typedef int32_t vi __attribute__((ext_vector_type(W)));
typedef uint16_t vh __attribute__((ext_vector_type(W)));
typedef float f4 __attribute__((ext_vector_type(4)));
typedef uint32_t u4 __attribute__((ext_vector_type(4)));

#define LOAD(type, from) \
    ({ \
        type loaded_; \
        __builtin_memcpy(&loaded_, (from), sizeof(type)); \
        loaded_; \
    })
#define STORE(to, value) \
    do { \
        __typeof__(value) stored_ = (value); \
        __builtin_memcpy((to), &stored_, sizeof(stored_)); \
    } while (0)

INLINE vf splat(float x) { return (vf)x; }
INLINE vu as_bits(vf x) { return __builtin_bit_cast(vu, x); }
INLINE vf as_floats(vu x) { return __builtin_bit_cast(vf, x); }
INLINE vf fma_(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }
/* The larger; b if either is NaN, so that a NaN in b stays. */
INLINE vf max_(vf a, vf b) { return a > b ? a : b; }
INLINE vf select_(vi mask, vf yes, vf no) { return as_floats((as_bits(yes) & (vu)mask) | (as_bits(no) & ~(vu)mask)); }

INLINE vf widen(vh x) { return as_floats(__builtin_convertvector(x, vu) << 16); }

/* To nearest, ties to even; NaN stays one. */
INLINE vh narrow(vf x) {
    vu bits = as_bits(x);
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu nan = (bits >> 16) | 0x40;
    vu is_nan = (vu)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (nan & is_nan), vh);
}

INLINE float widen1(uint16_t x) { return __builtin_bit_cast(float, (uint32_t)x << 16); }
INLINE uint16_t narrow1(float x) {
    uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return x != x ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Activations, whatever they are here. */
#if BF16_PRODUCTS
INLINE vf load_act(const act *from) { return widen(LOAD(vh, from)); }
INLINE void store_act(act *to, vf x) { STORE(to, narrow(x)); }
INLINE float act_value(act x) { return widen1(x); }
INLINE act as_act(float x) { return narrow1(x); }
#else
INLINE vf load_act(const act *from) { return LOAD(vf, from); }
INLINE void store_act(act *to, vf x) { STORE(to, x); }
INLINE float act_value(act x) { return x; }
INLINE act as_act(float x) { return x; }
#endif

/* Sums in a fixed order: halves are added until one number is left. */
INLINE float sum4(f4 x) { return (x[0] + x[2]) + (x[1] + x[3]); }
#if W == 16
INLINE f4 fold(vf x) {
    __typeof__(x.lo) half = x.lo + x.hi;
    return half.lo + half.hi;
}
#elif W == 8
INLINE f4 fold(vf x) { return x.lo + x.hi; }
#else
INLINE f4 fold(vf x) { return x; }
#endif
INLINE float sum(vf x) { return sum4(fold(x)); }
INLINE float largest(vf x) { return __builtin_reduce_max(x); }

/* e^x to 1 unit in the last place or two for x ≤ 0 and moderate x > 0; 0 far below. Source: Cephes, expf. */
INLINE vf exp_(vf x) {
    vi is_tiny = x < splat(-87.3f);
    x = max_(splat(-87.3f), x);
    x = splat(88.0f) < x ? splat(88.0f) : x;
    vf n = __builtin_elementwise_roundeven(x * splat(1.44269504088896341f));
    vf r = fma_(n, splat(-0.693359375f), x);
    r = fma_(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma_(p, r, splat(1.3981999507e-3f));
    p = fma_(p, r, splat(8.3334519073e-3f));
    p = fma_(p, r, splat(4.1665795894e-2f));
    p = fma_(p, r, splat(1.6666665459e-1f));
    p = fma_(p, r, splat(5.0000001201e-1f));
    p = fma_(p, r * r, r + splat(1.0f));
    vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
    return select_(is_tiny, splat(0.0f), p * as_floats((vu)exponent));
}

INLINE vf tanh_(vf x) {
    vf e = exp_(max_(splat(-80.0f), splat(-2.0f) * __builtin_elementwise_abs(x)));
    vf size = (splat(1.0f) - e) / (splat(1.0f) + e);
    return __builtin_elementwise_copysign(size, x);
}

/* acc += a pair of x × two neighbours of each of W columns: a line of packed bfloat16 holds the pairs of W columns side by
 * side. One order of adding, in each variant its own. */
#if BF16_PRODUCTS
typedef uint32_t x_pair;
INLINE x_pair load_pair(const act *x) { return LOAD(uint32_t, x); }
INLINE vf product(vf acc, vu pairs, x_pair x) {
    return __builtin_bit_cast(vf, _mm512_dpbf16_ps(__builtin_bit_cast(__m512, acc), __builtin_bit_cast(__m512bh, pairs),
                                                  __builtin_bit_cast(__m512bh, _mm512_set1_epi32((int)x))));
}
#else
typedef struct {
    float first, second;
} x_pair;
INLINE x_pair load_pair(const act *x) { return (x_pair){x[0], x[1]}; }
INLINE vf product(vf acc, vu pairs, x_pair x) {
    acc = fma_(as_floats(pairs << 16), splat(x.first), acc);
    return fma_(as_floats(pairs & 0xffff0000u), splat(x.second), acc);
}
#endif
