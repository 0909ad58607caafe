// Adapters in memory, and what they add to a product: h = x Aᵀ (shrink), then h Bᵀ (expand). True ranks, any row type, nothing
// padded.
//
// A row of h is a dot product whose order is fixed by its own length, and an output's delta is the sum of its ranks in ascending order.
// So what a row gets does not depend on how many rows share its adapter, nor on which of the ways below was taken.

#pragma once

#include <type_traits>

#include "step.h"
#include "tile.h"

namespace graftwork {

constexpr int64_t kRankChunk = 128;  // ranks of one site whose h is kept at a time
constexpr int64_t kSiteFields = 6;
constexpr int64_t kQuantisedHead = 16;
constexpr int64_t kLine = 64;  // bytes that memory is fetched in

enum RowType : int64_t { kBf16 = 0, kFp32 = 1, kInt8 = 2, kE4m3 = 3 };

inline bool is_row_type(int64_t type) { return kBf16 <= type && type <= kE4m3; }
inline bool has_scale(int64_t type) { return type == kInt8 || type == kE4m3; }

// A site record, as layout.SiteField says.
struct SiteRecord {
    int64_t a_row, b_row, rank, row_type, scale_row, bias_row;
};
static_assert(sizeof(SiteRecord) == kSiteFields * 8);

// One projection inside a packed linear: its number among an adapter's sites, and its columns.
struct Site {
    int64_t index, start, size;
};

struct AdapterMemory {
    const uint8_t* pool;
    const int64_t* row_offset;
    const SiteRecord* sites;  // [num_adapters, num_sites]
    int64_t pool_bytes, num_rows, num_adapters, num_sites;
};

constexpr SiteRecord kNoSite{-1, -1, 0, 0, -1, -1};

inline SiteRecord record_of(const AdapterMemory& memory, int64_t adapter, const Site& site, Step& step) {
    if (adapter < 0 || adapter >= memory.num_adapters) {
        report(step, kAdapterOutside);
        return kNoSite;
    }
    return memory.sites[adapter * memory.num_sites + site.index];
}

inline int64_t row_bytes(int64_t type, int64_t width) {
    switch (type) {
        case kBf16: return 2 * width;
        case kFp32: return 4 * width;
        default: return kQuantisedHead + width;
    }
}

// Where row `number` lies, or null (and a fault) where it would reach beyond memory.
inline const uint8_t* row_at(const AdapterMemory& memory, int64_t number, int64_t type, int64_t width, Step& step) {
    if (number >= 0 && number < memory.num_rows) {
        const int64_t offset = memory.row_offset[number];
        if (offset >= 0 && offset <= memory.pool_bytes - row_bytes(type, width)) return memory.pool + offset;
    }
    report(step, kRowOutside);
    return nullptr;
}

// How a row of each type is read: `load(row, i)` a vector of elements from i on, `element(row, i)` one, times `scale(row)`.
template <int64_t kType>
struct RowReader;

template <>
struct RowReader<kBf16> {
    static constexpr int64_t kBytes = 2;
    static float scale(const uint8_t*) { return 1.0f; }
    static Vec load(const uint8_t* row, int64_t i) { return graftwork::load(reinterpret_cast<const bf16*>(row) + i); }
    static float element(const uint8_t* row, int64_t i) { return widen(load_as<bf16>(row + 2 * i)); }
};

template <>
struct RowReader<kFp32> {
    static constexpr int64_t kBytes = 4;
    static float scale(const uint8_t*) { return 1.0f; }
    static Vec load(const uint8_t* row, int64_t i) { return graftwork::load(reinterpret_cast<const float*>(row) + i); }
    static float element(const uint8_t* row, int64_t i) { return load_as<float>(row + 4 * i); }
};

template <>
struct RowReader<kInt8> {
    static constexpr int64_t kBytes = 1;
    static float scale(const uint8_t* row) { return load_as<float>(row); }
    static Vec load(const uint8_t* row, int64_t i) {
        return graftwork::load(reinterpret_cast<const int8_t*>(row) + kQuantisedHead + i);
    }
    static float element(const uint8_t* row, int64_t i) { return static_cast<int8_t>(row[kQuantisedHead + i]); }
};

// OCP e4m3fn, read as 2^-8 of its value, which the scale makes up for: so fp16, whose bias is 15 for 7, has a code's bits in its own
// order, subnormals too. Only NaN would come out as 480 * 2^-8. Without fp16, exponent and mantissa move to fp32's places.
template <>
struct RowReader<kE4m3> {
    static constexpr int64_t kBytes = 1;
    static float scale(const uint8_t* row) { return load_as<float>(row) * 256.0f; }
#if defined(__AVX512BW__) && defined(__AVX512VL__) && GRAFTWORK_LANES == 16
    static Vec load(const uint8_t* row, int64_t i) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(row + kQuantisedHead + i));
        const __mmask16 is_nan = _mm_cmpeq_epi8_mask(_mm_or_si128(codes, _mm_set1_epi8(-0x80)), _mm_set1_epi8(-1));
        const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7), _mm256_set1_epi16(kHalfBits));
        const __m512 value = _mm512_cvtph_ps(halves);
        return (Vec)_mm512_mask_blend_ps(is_nan, value, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
    }
#elif defined(__AVX2__) && defined(__F16C__) && GRAFTWORK_LANES == 8
    static Vec load(const uint8_t* row, int64_t i) {
        const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(row + kQuantisedHead + i));
        const __m128i halves = _mm_and_si128(_mm_slli_epi16(_mm_cvtepi8_epi16(codes), 7), _mm_set1_epi16(kHalfBits));
        const __m128i magnitude = _mm_and_si128(halves, _mm_set1_epi16(0x3f80));
        const __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x3f80));
        return (Vec)_mm256_cvtph_ps(_mm_or_si128(halves, is_nan));
    }
#else
    static Vec load(const uint8_t* row, int64_t i) {
        const Bits code = __builtin_convertvector(load_as<Bytes>(row + kQuantisedHead + i), Bits);
        const Bits magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
        const Vec normal = reinterpret_cast<Vec>((magnitude << 20) + (112u << 23));  // 120 more would turn bias 7 into 127
        const Vec small = __builtin_convertvector(reinterpret_cast<Ints>(magnitude), Vec) * 0x1p-17f;  // subnormals, scaled by hand
        const Vec value = magnitude < 8u ? small : normal;
        const Bits bits = magnitude == 0x7fu ? Bits{} + 0x7fc00000u : reinterpret_cast<Bits>(value);
        return reinterpret_cast<Vec>(bits | sign);
    }
#endif
    static float element(const uint8_t* row, int64_t i) {
        const uint32_t code = row[kQuantisedHead + i], magnitude = code & 0x7fu;
        const uint32_t normal = (magnitude << 20) + (112u << 23);
        float value = magnitude < 8u ? static_cast<float>(magnitude) * 0x1p-17f : load_as<float>(&normal);
        if (magnitude == 0x7fu) value = std::numeric_limits<float>::quiet_NaN();
        return code & 0x80u ? -value : value;
    }

private:
    static constexpr int16_t kHalfBits = static_cast<int16_t>(0xbf80);  // sign, exponent but for its top bit, three of the mantissa
};

// Rows of A that a tile of so many rows of x takes at once: its accumulators and the operands beside them fill the registers.
constexpr int ranks_at_once(int num_members) {
    for (int ranks = 8; ranks > 2; ranks /= 2)
        if (ranks * num_members <= 2 * kTileRows) return ranks;
    return 2;
}

// Bytes from a row to the next where they lie one after the other.
template <int64_t kType>
constexpr int64_t row_stride(int64_t width) {
    return round_up(width * RowReader<kType>::kBytes + (has_scale(kType) ? kQuantisedHead : 0), kLine);
}

// Fetches what lies from `next` on while `num_rows` rows are read: as many bytes, spread evenly. Into the second cache, since a core
// waits for few lines at a time that are to go into the first; and some way ahead, as what is read next mostly lies behind that. Null
// fetches nothing.
template <int64_t kType>
class Fetch {
public:
    Fetch(const uint8_t* next, int64_t num_rows, int64_t width)
        : at_(next == nullptr ? nullptr : next + kAhead),
          end_(next == nullptr ? nullptr : at_ + num_rows * row_stride<kType>(width)) {}

    // Called where `kBytesRead` bytes are read, of all rows together.
    template <int64_t kBytesRead>
    void ahead() {
        if (at_ == nullptr) return;
#pragma GCC unroll 16
        for (int64_t line = 0; line < kBytesRead; line += kLine) ask(at_ + line);
        at_ += kBytesRead;
    }

    void rest() {
        for (; at_ < end_; at_ += kLine) ask(at_);
    }

private:
    static constexpr int64_t kAhead = 4096;
    static void ask(const uint8_t* line) { __builtin_prefetch(line, 0, 2); }

    const uint8_t* at_;
    const uint8_t* end_;
};

// h[member * h_stride + rank] = x[member * x_stride ..] · a[rank] for kRanks rows of A and kMembers rows of x. From `next` on lies what
// will be read after these rows: it is fetched meanwhile.
template <int64_t kType, int kRanks, int kMembers>
inline void dot_tile(const uint8_t* const* a, const float* x, int64_t x_stride, int64_t width, float* h, int64_t h_stride,
                     const uint8_t* next) {
    using Reader = RowReader<kType>;
    constexpr int64_t kStep = 2 * kLanes;
    Fetch<kType> fetch(next, kRanks, width);
    Vec acc[kRanks][kMembers] = {};
    int64_t k = 0;
    for (; k + kStep <= width; k += kStep) {
        fetch.template ahead<kStep * kRanks * Reader::kBytes>();
#pragma GCC unroll 2
        for (int64_t half = k; half < k + kStep; half += kLanes) {
            Vec w[kRanks];
#pragma GCC unroll 8
            for (int rank = 0; rank < kRanks; ++rank) w[rank] = Reader::load(a[rank], half);
#pragma GCC unroll 12
            for (int member = 0; member < kMembers; ++member) {
                const Vec own = load(x + member * x_stride + half);
#pragma GCC unroll 8
                for (int rank = 0; rank < kRanks; ++rank) acc[rank][member] = fma(w[rank], own, acc[rank][member]);
            }
        }
    }
    fetch.rest();
    float sums[kRanks][kMembers];  // unrolled, or the accumulators would be written to memory in each step above
#pragma GCC unroll 8
    for (int rank = 0; rank < kRanks; ++rank)
#pragma GCC unroll 12
        for (int member = 0; member < kMembers; ++member) sums[rank][member] = sum(acc[rank][member]);
    for (int rank = 0; rank < kRanks; ++rank)
        for (int member = 0; member < kMembers; ++member) {
            float total = sums[rank][member];
            const float* row = x + member * x_stride;
            for (int64_t rest = k; rest < width; ++rest) total = fma(Reader::element(a[rank], rest), row[rest], total);
            h[member * h_stride + rank] = total * Reader::scale(a[rank]);
        }
}

// The same for any number of rows of A.
template <int64_t kType, int kMembers>
inline void dot_rows(const uint8_t* const* a, int64_t num_ranks, const float* x, int64_t x_stride, int64_t width, float* h,
                     int64_t h_stride, const uint8_t* next) {
    constexpr int kRanks = ranks_at_once(kMembers);
    int64_t rank = 0;
    for (; rank + kRanks <= num_ranks; rank += kRanks, next += kRanks * row_stride<kType>(width))
        dot_tile<kType, kRanks, kMembers>(a + rank, x, x_stride, width, h + rank, h_stride, next);
    for (; rank < num_ranks; ++rank, next += row_stride<kType>(width))
        dot_tile<kType, 1, kMembers>(a + rank, x, x_stride, width, h + rank, h_stride, next);
}

// Some rows of B: row i begins at pool + offset[i].
struct RankRows {
    const uint8_t* pool;
    const int64_t* offset;
    int64_t count;

    const uint8_t* at(int64_t rank) const { return pool + offset[rank]; }
};

// What adapters add to some rows of a product, fp32, columns in order: those of row i begin at rows + i * stride.
struct Delta {
    float* rows;
    int64_t stride;

    float* at(int64_t row, int64_t column) const { return rows + row * stride + column; }
};

// to[member][..] += Σ_rank h[member * h_stride + rank] * b[rank][from ..] for kRanks rows of B, `count` columns and kMembers rows. The
// scales of B are in h already: a row's head is far from most of its columns. What lies from `next` on is fetched meanwhile.
template <int64_t kType, int kRanks, int kMembers>
inline void add_block(const uint8_t* const* b, int64_t from, int64_t count, const float* h, int64_t h_stride, Delta to,
                      const uint8_t* next) {
    using Reader = RowReader<kType>;
    constexpr int64_t kStep = 2 * kLanes;
    Fetch<kType> fetch(next, kRanks, count);
    float factor[kRanks][kMembers];  // a copy: h and the delta are both fp32, and could be the same memory for all the compiler knows
    for (int rank = 0; rank < kRanks; ++rank)
        for (int member = 0; member < kMembers; ++member) factor[rank][member] = h[member * h_stride + rank];
    int64_t i = 0;
    for (; i + kStep <= count; i += kStep) {
        fetch.template ahead<kStep * kRanks * Reader::kBytes>();
        Vec total[kMembers][2];
#pragma GCC unroll 12
        for (int member = 0; member < kMembers; ++member)
            total[member][0] = load(to.at(member, i)), total[member][1] = load(to.at(member, i + kLanes));
#pragma GCC unroll 8
        for (int rank = 0; rank < kRanks; ++rank) {
            const Vec first = Reader::load(b[rank], from + i), second = Reader::load(b[rank], from + i + kLanes);
#pragma GCC unroll 12
            for (int member = 0; member < kMembers; ++member) {
                const Vec own = splat(factor[rank][member]);
                total[member][0] = fma(own, first, total[member][0]);
                total[member][1] = fma(own, second, total[member][1]);
            }
        }
#pragma GCC unroll 12
        for (int member = 0; member < kMembers; ++member)
            store(to.at(member, i), total[member][0]), store(to.at(member, i + kLanes), total[member][1]);
    }
    fetch.rest();
    for (; i < count; ++i)
        for (int member = 0; member < kMembers; ++member)
            for (int rank = 0; rank < kRanks; ++rank)
                *to.at(member, i) = fma(factor[rank][member], Reader::element(b[rank], from + i), *to.at(member, i));
}

constexpr int kRanksAdded = 8;
constexpr int64_t kColumnsAdded = 4096;  // of all rows together: their sums stay in the nearest cache while B goes by

// The same for any number of rows of B. Where a few rows take all columns at once, B is read from end to end, and then `next`.
template <int64_t kType, int kMembers>
inline void add_rows(const RankRows& b, int64_t from, int64_t count, const float* h, int64_t h_stride, Delta to,
                     const uint8_t* next) {
    constexpr int64_t kWidth = kColumnsAdded / kMembers / kPanel * kPanel;
    for (int64_t begin = 0; begin < count; begin += kWidth) {
        const int64_t width = count - begin < kWidth ? count - begin : kWidth;
        const Delta part{to.at(0, begin), to.stride};
        const bool is_whole = width == count && next != nullptr;
        int64_t rank = 0;
        for (; rank + kRanksAdded <= b.count; rank += kRanksAdded) {
            const uint8_t* rows[kRanksAdded];
            for (int i = 0; i < kRanksAdded; ++i) rows[i] = b.at(rank + i);
            const uint8_t* after = !is_whole ? nullptr : (rank + kRanksAdded < b.count ? b.at(rank + kRanksAdded) : next);
            add_block<kType, kRanksAdded, kMembers>(rows, from + begin, width, h + rank, h_stride, part, after);
        }
        for (; rank < b.count; ++rank) {
            const uint8_t* row = b.at(rank);
            add_block<kType, 1, kMembers>(&row, from + begin, width, h + rank, h_stride, part, nullptr);
        }
    }
}

// Call `body` with the row type as a constant.
template <class Body>
inline void with_row_type(int64_t type, Body&& body) {
    switch (type) {
        case kBf16: body(std::integral_constant<int64_t, kBf16>{}); break;
        case kFp32: body(std::integral_constant<int64_t, kFp32>{}); break;
        case kInt8: body(std::integral_constant<int64_t, kInt8>{}); break;
        default: body(std::integral_constant<int64_t, kE4m3>{}); break;
    }
}

// Call `body` with `count`, 1 .. kMost, as a constant.
template <int kMost, class Body>
inline void with_count(int64_t count, Body&& body) {
    if (count == kMost) return body(std::integral_constant<int, kMost>{});
    if constexpr (kMost > 1) with_count<kMost - 1>(count, body);
}

}  // namespace graftwork
