// Vectors of fp32 as wide as the machine's registers, and bf16 to and from them. Everything else is written in these terms.
//
// GCC's vector extensions give the same code on AVX-512, AVX2 and anything else; a multiplication whose result is added becomes one
// fused operation where the machine has it (-ffp-contract=fast). Sums are in a fixed order, so that a result does not depend on how
// work was dealt out.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// What the machine has, unless the one who compiles asks for another's: its code then runs here too, slowly.
#if !defined(GRAFTWORK_LANES)
#if defined(__AVX512F__)
#define GRAFTWORK_LANES 16
#elif defined(__AVX2__)
#define GRAFTWORK_LANES 8
#else
#define GRAFTWORK_LANES 4
#endif
#endif
#if !defined(GRAFTWORK_PAIRS)
#if defined(__AVX512BF16__)
#define GRAFTWORK_PAIRS 1  // bf16 is multiplied in pairs
#else
#define GRAFTWORK_PAIRS 0
#endif
#endif

namespace graftwork {

constexpr int kLanes = GRAFTWORK_LANES;

using bf16 = uint16_t;  // the upper half of an fp32

using Vec = float __attribute__((vector_size(kLanes * 4)));
using Bits = uint32_t __attribute__((vector_size(kLanes * 4)));
using Ints = int32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));
using Bytes = uint8_t __attribute__((vector_size(kLanes)));
using SignedBytes = int8_t __attribute__((vector_size(kLanes)));

template <class T>
inline T load_as(const void* from) {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

inline Vec load(const float* from) { return load_as<Vec>(from); }
inline void store(float* to, Vec value) { std::memcpy(to, &value, sizeof(value)); }
inline Vec splat(float value) { return value - Vec{}; }  // x - 0 is x, for -0 too, and the compiler knows: one broadcast

// a * b + c, with one rounding where the machine has it. Said outright, since what the compiler fuses by itself may differ between two
// shapes of one loop, and a row must have the same bits in both.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__) && GRAFTWORK_LANES == 16
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && GRAFTWORK_LANES == 8
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__) && GRAFTWORK_LANES == 4
    return (Vec)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#else
    return a * b + c;
#endif
}

inline float fma(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

inline float widen(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    return load_as<float>(&bits);
}

// Round to the nearest bf16, halves to even; NaN stays NaN.
inline bf16 narrow(float value) {
    const uint32_t bits = load_as<uint32_t>(&value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<bf16>((bits >> 16) | 0x40u);
    return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline Vec load(const bf16* from) { return reinterpret_cast<Vec>(__builtin_convertvector(load_as<Halves>(from), Bits) << 16); }

inline void store(bf16* to, Vec value) {
    const Bits bits = reinterpret_cast<Bits>(value);
    const Bits rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    const Bits is_nan = reinterpret_cast<Bits>(value != value);  // all ones, which as a bf16 are NaN
    const Halves halves = __builtin_convertvector((rounded | is_nan) >> 16, Halves);
    std::memcpy(to, &halves, sizeof(halves));
}

inline float read(const float* from) { return *from; }
inline float read(const bf16* from) { return widen(*from); }
inline void write(float* to, float value) { *to = value; }
inline void write(bf16* to, float value) { *to = narrow(value); }

// The lanes' sum, folded in halves.
inline float sum(Vec value) {
    float lanes[kLanes];
    store(lanes, value);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    return lanes[0];
}

inline float largest(Vec value) {
    float lanes[kLanes];
    store(lanes, value);
    float result = lanes[0];
    for (int lane = 1; lane < kLanes; ++lane) result = lanes[lane] > result ? lanes[lane] : result;
    return result;
}

// x = e^x within 2e-7 of the value; 0 below -87.7, infinity above 88.4, NaN for NaN. Of several vectors, each operation is done for
// all before the next: one alone leaves the machine waiting for its chain of dependent operations.
template <int kCount>
inline void exponential(Vec (&x)[kCount]) {
    constexpr float kShift = 12582912.0f + 127.0f;  // 1.5 * 2^23: what is added is rounded to a whole number, in the low bits
    constexpr float kSeries[] = {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                 5.0000001201e-1f, 1.0f,             1.0f};
    Vec shifted[kCount], rest[kCount], series[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
        // Beyond these bounds the power of two below comes out as 0 or infinity. NaN, the second operand, passes both comparisons.
        const Vec above = maximum(splat(-88.1f), x[i]);
        x[i] = 88.8f < above ? splat(88.8f) : above;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) shifted[i] = x[i] * 1.44269504f + kShift;
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
        const Vec power = shifted[i] - kShift;
        rest[i] = x[i] - power * 0.693359375f + power * 2.12194440e-4f;  // ln 2 in two parts
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) series[i] = splat(1.9875691500e-4f);
#pragma GCC unroll 8
    for (const float term : kSeries) {
#pragma GCC unroll 4
        for (int i = 0; i < kCount; ++i) series[i] = series[i] * rest[i] + term;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) x[i] = series[i] * reinterpret_cast<Vec>(reinterpret_cast<Bits>(shifted[i]) << 23);
}

inline Vec exponential(Vec x) {
    Vec alone[1] = {x};
    exponential(alone);
    return alone[0];
}

}  // namespace graftwork
