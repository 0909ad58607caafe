// Adapters in memory, and what they add to a product: h = x Aᵀ (shrink), then h Bᵀ (expand). True ranks, any row type, nothing
// padded.
//
// A row of h is a dot product whose order is fixed by its own length, and an output adds its ranks in ascending order. So what a
// row gets does not depend on how many rows share its adapter.

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

// How a row of each type is read: `split(row, i)` two vectors of elements from i on, `element(row, i)` one, times `scale(row)`.
template <int64_t kType>
struct RowReader;

template <>
struct RowReader<kBf16> {
    static constexpr int64_t kBytes = 2;
    static float scale(const uint8_t*) { return 1.0f; }
    static Split split(const uint8_t* row, int64_t i) { return graftwork::split(reinterpret_cast<const bf16*>(row) + i); }
    static float element(const uint8_t* row, int64_t i) { return widen(load_as<bf16>(row + 2 * i)); }
};

template <>
struct RowReader<kFp32> {
    static constexpr int64_t kBytes = 4;
    static float scale(const uint8_t*) { return 1.0f; }
    static Split split(const uint8_t* row, int64_t i) {
        const float* from = reinterpret_cast<const float*>(row) + i;
        return graftwork::split(load(from), load(from + kLanes));
    }
    static float element(const uint8_t* row, int64_t i) { return load_as<float>(row + 4 * i); }
};

template <>
struct RowReader<kInt8> {
    static constexpr int64_t kBytes = 1;
    static float scale(const uint8_t* row) { return load_as<float>(row); }
    static Split split(const uint8_t* row, int64_t i) {
        const Ints two = reinterpret_cast<Ints>(widen_halves(row + kQuantisedHead + i));
        return {__builtin_convertvector(two << 24 >> 24, Vec), __builtin_convertvector(two << 16 >> 24, Vec)};
    }
    static float element(const uint8_t* row, int64_t i) { return static_cast<int8_t>(row[kQuantisedHead + i]); }
};

// OCP e4m3fn: exponent and mantissa move to fp32's places at once, 120 more turns bias 7 into 127; subnormals are scaled by hand.
template <>
struct RowReader<kE4m3> {
    static constexpr int64_t kBytes = 1;
    static float scale(const uint8_t* row) { return load_as<float>(row); }
    static Split split(const uint8_t* row, int64_t i) {
        const Bits two = widen_halves(row + kQuantisedHead + i);
        return {decode(two & 0xffu), decode(two >> 8)};
    }
    static Vec decode(Bits code) {
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

// Rows of A that a tile of so many rows of x takes at once: its accumulators and the operands beside them fill the registers.
constexpr int ranks_at_once(int num_members) {
    for (int ranks = 8; ranks > 2; ranks /= 2)
        if (ranks * num_members <= 2 * kTileRows) return ranks;
    return 2;
}

// h[member * h_stride + rank] = x[member * x_stride ..] · a[rank] for kRanks rows of A and kMembers rows of x, whose elements stand
// split, block by block of two vectors, the rest in order. From `next` on lies what will be read after these rows: it is fetched
// meanwhile.
template <int64_t kType, int kRanks, int kMembers>
inline void dot_tile(const uint8_t* const* a, const float* x, int64_t x_stride, int64_t width, float* h, int64_t h_stride,
                     const uint8_t* next) {
    using Reader = RowReader<kType>;
    constexpr int64_t kStep = 2 * kLanes;
    Vec acc[kRanks][kMembers] = {};
    int64_t k = 0;
    for (; k + kStep <= width; k += kStep) {
#pragma GCC unroll 8
        for (int64_t line = 0; line < kStep * kRanks * Reader::kBytes; line += kLine)
            __builtin_prefetch(next + k * kRanks * Reader::kBytes + line);
        Split w[kRanks];
#pragma GCC unroll 8
        for (int rank = 0; rank < kRanks; ++rank) w[rank] = Reader::split(a[rank], k);
#pragma GCC unroll 12
        for (int member = 0; member < kMembers; ++member) {
            const Vec even = load(x + member * x_stride + k), odd = load(x + member * x_stride + k + kLanes);
#pragma GCC unroll 8
            for (int rank = 0; rank < kRanks; ++rank) acc[rank][member] = fma(w[rank].even, even, acc[rank][member]);
#pragma GCC unroll 8
            for (int rank = 0; rank < kRanks; ++rank) acc[rank][member] = fma(w[rank].odd, odd, acc[rank][member]);
        }
    }
    for (int rank = 0; rank < kRanks; ++rank)
        for (int member = 0; member < kMembers; ++member) {
            float total = sum(acc[rank][member]);
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
    for (; rank + kRanks <= num_ranks; rank += kRanks, next += kRanks * RowReader<kType>::kBytes * width)
        dot_tile<kType, kRanks, kMembers>(a + rank, x, x_stride, width, h + rank, h_stride, next);
    for (; rank < num_ranks; ++rank) dot_tile<kType, 1, kMembers>(a + rank, x, x_stride, width, h + rank, h_stride, next);
}

// Some rows of B: row i begins at pool + offset[i].
struct RankRows {
    const uint8_t* pool;
    const int64_t* offset;
    int64_t count;

    const uint8_t* at(int64_t rank) const { return pool + offset[rank]; }
};

// Sums of a run's rows, panel by panel: those of row i begin at rows + i * stride.
struct Sums {
    float* rows;
    int64_t stride;

    float* panel(int64_t row, int64_t column) const { return rows + row * stride + column / kPanel * kPanel; }
};

// sums[member][to ..] += Σ_rank h[member * h_stride + rank] * b[rank][from ..] for kMembers rows and kPanels whole panels.
template <int64_t kType, int kMembers, int kPanels>
inline void add_to_panels(const RankRows& b, int64_t from, const float* h, int64_t h_stride, Sums sums, int64_t to) {
    using Reader = RowReader<kType>;
    Split total[kMembers][kPanels];
#pragma GCC unroll 12
    for (int member = 0; member < kMembers; ++member)
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel) {
            const float* place = sums.panel(member, to) + panel * kPanel;
            total[member][panel] = {load(place), load(place + kLanes)};
        }
    for (int64_t rank = 0; rank < b.count; ++rank) {
        const uint8_t* row = b.at(rank);
        const float scale = Reader::scale(row);
        Vec element[kMembers];
#pragma GCC unroll 12
        for (int member = 0; member < kMembers; ++member) element[member] = splat(h[member * h_stride + rank] * scale);
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel) {
            const Split w = Reader::split(row, from + panel * kPanel);
#pragma GCC unroll 12
            for (int member = 0; member < kMembers; ++member) {
                total[member][panel].even = fma(element[member], w.even, total[member][panel].even);
                total[member][panel].odd = fma(element[member], w.odd, total[member][panel].odd);
            }
        }
    }
#pragma GCC unroll 12
    for (int member = 0; member < kMembers; ++member)
#pragma GCC unroll 4
        for (int panel = 0; panel < kPanels; ++panel) {
            float* place = sums.panel(member, to) + panel * kPanel;
            store(place, total[member][panel].even);
            store(place + kLanes, total[member][panel].odd);
        }
}

// The same for single columns: those of a panel that a projection does not fill.
template <int64_t kType, int kMembers>
inline void add_columns(const RankRows& b, int64_t from, int64_t count, const float* h, int64_t h_stride, Sums sums, int64_t to) {
    using Reader = RowReader<kType>;
    for (int64_t i = 0; i < count; ++i)
        for (int member = 0; member < kMembers; ++member) {
            float& total = sums.panel(member, to + i)[place_in_panel((to + i) % kPanel)];
            for (int64_t rank = 0; rank < b.count; ++rank) {
                const uint8_t* row = b.at(rank);
                total = fma(h[member * h_stride + rank] * Reader::scale(row), Reader::element(row, from + i), total);
            }
        }
}

// The same for any number of columns.
template <int64_t kType, int kMembers>
inline void add_ranks(const RankRows& b, int64_t from, int64_t count, const float* h, int64_t h_stride, Sums sums, int64_t to) {
    constexpr int kAtOnce = kMembers == 1 ? 4 : (4 * kMembers <= 2 * kTileRows ? 2 : 1);  // panels: their sums fill the registers
    int64_t i = (kPanel - to % kPanel) % kPanel;
    i = i < count ? i : count;
    add_columns<kType, kMembers>(b, from, i, h, h_stride, sums, to);
    for (; i + kAtOnce * kPanel <= count; i += kAtOnce * kPanel)
        add_to_panels<kType, kMembers, kAtOnce>(b, from + i, h, h_stride, sums, to + i);
    for (; i + kPanel <= count; i += kPanel) add_to_panels<kType, kMembers, 1>(b, from + i, h, h_stride, sums, to + i);
    add_columns<kType, kMembers>(b, from + i, count - i, h, h_stride, sums, to + i);
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
