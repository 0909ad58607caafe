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

// a * b + c, with one rounding where the machine has it. Said outright, since what the compiler fuses by itself may differ between
// two shapes of one loop, and a row must have the same bits in both.
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

// 16-bit numbers from memory, each widened to a lane. Said outright where the machine has an instruction for it: the compiler's own
// way takes several.
inline Bits widen_halves(const void* from) {
#if defined(__AVX512F__) && GRAFTWORK_LANES == 16
    return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__AVX2__) && GRAFTWORK_LANES == 8
    return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#else
    return __builtin_convertvector(load_as<Halves>(from), Bits);
#endif
}

inline Vec load(const bf16* from) { return reinterpret_cast<Vec>(widen_halves(from) << 16); }

// Whole numbers of 8 bits from memory, each a lane's value.
inline Vec load(const int8_t* from) {
#if defined(__AVX512F__) && GRAFTWORK_LANES == 16
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__) && GRAFTWORK_LANES == 8
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    return __builtin_convertvector(__builtin_convertvector(load_as<SignedBytes>(from), Ints), Vec);
#endif
}

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

// Two vectors' worth of neighbours, those at even places apart from those at odd ones: how 16-bit numbers come out of 32-bit words
// without being moved.
struct Split {
    Vec even, odd;
};

inline Split split(Vec first, Vec second) {
    Ints even, odd;
    for (int i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
    return {__builtin_shuffle(first, second, even), __builtin_shuffle(first, second, odd)};
}

inline void join(const Split& split, Vec& first, Vec& second) {
    Ints low, high;
    for (int i = 0; i < kLanes; ++i) {
        low[i] = i / 2 + i % 2 * kLanes;
        high[i] = low[i] + kLanes / 2;
    }
    first = __builtin_shuffle(split.even, split.odd, low);
    second = __builtin_shuffle(split.even, split.odd, high);
}

inline Split split(const bf16* from) {
    const Bits words = load_as<Bits>(from);
    return {reinterpret_cast<Vec>(words << 16), reinterpret_cast<Vec>(words & 0xffff0000u)};
}

// Each lane's partner is `distance` lanes away.
template <int kDistance>
inline Vec partners(Vec value) {
    Ints lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i ^ kDistance;
    return __builtin_shuffle(value, lane);
}

// The lanes' sum, folded in halves.
inline float sum(Vec value) {
#if defined(__AVX2__) && GRAFTWORK_LANES == 8
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
#else
    if constexpr (kLanes > 8) value += partners<8>(value);
    if constexpr (kLanes > 4) value += partners<4>(value);
    value += partners<2>(value);
    value += partners<1>(value);
    return value[0];
#endif
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
