// Adapters in memory, and what they add to a product: h = x Aᵀ (shrink), then h Bᵀ (expand). True ranks, any row type, nothing padded.
//
// A row of h is a dot product whose order is fixed by its own length, and an output adds its ranks in ascending order. So what a row
// gets does not depend on how many rows share its adapter.

#pragma once

#include <type_traits>

#include "step.h"
#include "vec.h"

namespace graftwork {

constexpr int64_t kRankChunk = 128;  // ranks of one site whose h is kept at a time
constexpr int64_t kSiteFields = 6;
constexpr int64_t kQuantisedHead = 16;

enum RowType : int64_t { kBf16 = 0, kFp32 = 1, kInt8 = 2, kE4m3 = 3 };

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

// The rows of a step grouped by adapter, as layout.AdapterBatch says.
struct AdapterRows {
    const int32_t* token_adapter;
    const int64_t* permutation;
    const int32_t* segment_start;
    const int32_t* segment_adapter;
    const int32_t* num_segments;
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

// How a row of each type is read: `vector(row, i)` the elements from i on, `element(row, i)` one, times `scale(row)`.
template <int64_t kType>
struct RowReader;

template <>
struct RowReader<kBf16> {
    static float scale(const uint8_t*) { return 1.0f; }
    static Vec vector(const uint8_t* row, int64_t i) { return load(reinterpret_cast<const bf16*>(row) + i); }
    static float element(const uint8_t* row, int64_t i) { return widen(load_as<bf16>(row + 2 * i)); }
};

template <>
struct RowReader<kFp32> {
    static float scale(const uint8_t*) { return 1.0f; }
    static Vec vector(const uint8_t* row, int64_t i) { return load(reinterpret_cast<const float*>(row) + i); }
    static float element(const uint8_t* row, int64_t i) { return load_as<float>(row + 4 * i); }
};

template <>
struct RowReader<kInt8> {
    static float scale(const uint8_t* row) { return load_as<float>(row); }
    static Vec vector(const uint8_t* row, int64_t i) {
        return __builtin_convertvector(load_as<SignedBytes>(row + kQuantisedHead + i), Vec);
    }
    static float element(const uint8_t* row, int64_t i) { return static_cast<int8_t>(row[kQuantisedHead + i]); }
};

// OCP e4m3fn: exponent and mantissa move to fp32's places at once, 120 more turns bias 7 into 127; subnormals are scaled by hand.
template <>
struct RowReader<kE4m3> {
    static float scale(const uint8_t* row) { return load_as<float>(row); }
    static Vec vector(const uint8_t* row, int64_t i) {
        const Bits code = __builtin_convertvector(load_as<Bytes>(row + kQuantisedHead + i), Bits);
        const Bits magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
        const Vec normal = reinterpret_cast<Vec>((magnitude << 20) + (120u << 23));
        const Vec small = __builtin_convertvector(reinterpret_cast<Ints>(magnitude), Vec) * 0x1p-9f;
        const Vec value = magnitude < 8u ? small : normal;
        const Bits bits = magnitude == 0x7fu ? Bits{} + 0x7fc00000u : reinterpret_cast<Bits>(value);
        return reinterpret_cast<Vec>(bits | sign);
    }
    static float element(const uint8_t* row, int64_t i) {
        const uint32_t code = row[kQuantisedHead + i], magnitude = code & 0x7fu;
        const uint32_t normal = (magnitude << 20) + (120u << 23);
        float value = magnitude < 8u ? static_cast<float>(magnitude) * 0x1p-9f : load_as<float>(&normal);
        if (magnitude == 0x7fu) value = std::numeric_limits<float>::quiet_NaN();
        return code & 0x80u ? -value : value;
    }
};

// h[member][rank] = x[member] · a[rank] for kRows rows of A and kMembers rows of x.
template <int64_t kType, int kRows, int kMembers>
inline void dot_tile(const uint8_t* const* a, const float* const* x, int64_t width, float* const* h) {
    using Reader = RowReader<kType>;
    Vec acc[kRows][kMembers] = {};
    int64_t k = 0;
    for (; k + kLanes <= width; k += kLanes) {
        Vec element[kMembers];
#pragma GCC unroll 4
        for (int member = 0; member < kMembers; ++member) element[member] = load(x[member] + k);
#pragma GCC unroll 4
        for (int row = 0; row < kRows; ++row) {
            const Vec w = Reader::vector(a[row], k);
#pragma GCC unroll 4
            for (int member = 0; member < kMembers; ++member) acc[row][member] = fma(w, element[member], acc[row][member]);
        }
    }
    for (int row = 0; row < kRows; ++row)
        for (int member = 0; member < kMembers; ++member) {
            float total = sum(acc[row][member]);
            for (int64_t rest = k; rest < width; ++rest) total = fma(Reader::element(a[row], rest), x[member][rest], total);
            h[member][row] = total * Reader::scale(a[row]);
        }
}

template <int64_t kType, int kRows>
inline void dot_rows(const uint8_t* const* a, const float* const* x, int64_t num_members, int64_t width, float* const* h) {
    int64_t member = 0;
    for (; member + 3 <= num_members; member += 3) dot_tile<kType, kRows, 3>(a, x + member, width, h + member);
    for (; member < num_members; ++member) dot_tile<kType, kRows, 1>(a, x + member, width, h + member);
}

// y[member][0 .. width) += Σ_rank h[member][rank] * b[rank], kMembers rows of y and kVectors vectors of each at a time.
template <int64_t kType, int kMembers, int kVectors>
inline int64_t axpy_tiles(const uint8_t* const* b, const float* const* h, int64_t num_ranks, int64_t column, int64_t begin, int64_t end,
                          float* const* y) {
    using Reader = RowReader<kType>;
    for (; begin + kVectors * kLanes <= end; begin += kVectors * kLanes) {
        Vec acc[kMembers][kVectors];
#pragma GCC unroll 4
        for (int member = 0; member < kMembers; ++member)
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector) acc[member][vector] = load(y[member] + begin + vector * kLanes);
        for (int64_t rank = 0; rank < num_ranks; ++rank) {
            const float scale = Reader::scale(b[rank]);
            Vec element[kMembers];
#pragma GCC unroll 4
            for (int member = 0; member < kMembers; ++member) element[member] = splat(h[member][rank] * scale);
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector) {
                const Vec w = Reader::vector(b[rank], column + begin + vector * kLanes);
#pragma GCC unroll 4
                for (int member = 0; member < kMembers; ++member) acc[member][vector] = fma(element[member], w, acc[member][vector]);
            }
        }
#pragma GCC unroll 4
        for (int member = 0; member < kMembers; ++member)
#pragma GCC unroll 8
            for (int vector = 0; vector < kVectors; ++vector) store(y[member] + begin + vector * kLanes, acc[member][vector]);
    }
    return begin;
}

template <int64_t kType, int kMembers>
inline void axpy(const uint8_t* const* b, const float* const* h, int64_t num_ranks, int64_t column, int64_t width, float* const* y) {
    using Reader = RowReader<kType>;
    int64_t done = axpy_tiles<kType, kMembers, kMembers == 1 ? 8 : 4>(b, h, num_ranks, column, 0, width, y);
    done = axpy_tiles<kType, kMembers, 1>(b, h, num_ranks, column, done, width, y);
    for (; done < width; ++done)
        for (int member = 0; member < kMembers; ++member) {
            float total = y[member][done];
            for (int64_t rank = 0; rank < num_ranks; ++rank)
                total = fma(h[member][rank] * Reader::scale(b[rank]), Reader::element(b[rank], column + done), total);
            y[member][done] = total;
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

}  // namespace graftwork
