// The heart of every matrix product: a tile of rows times a panel of columns, accumulated in registers.
//
// A weight [out, in] lies in panels of kPanel output columns. Within a panel the columns stand side by side for each k, so that one
// broadcast element of x meets a whole vector of them: first the even columns, then the odd ones, which is how a row of bf16 comes
// out of the words it lies in, so an adapter's row of B meets a panel's sums as it is. bf16 keeps two ks together, the pair that
// the machine's bf16 dot product takes. Each output is one sum over k in ascending order whatever the tile's shape, so a row has
// the same bits alone and among others.

#pragma once

#include "vec.h"

namespace graftwork {

constexpr int kPanel = 2 * kLanes;  // columns
constexpr int kTileRows = kLanes == 16 ? 12 : 6;  // as many accumulators as registers hold beside the operands

// Place of a column within its panel.
constexpr int64_t place_in_panel(int64_t column) { return column % 2 * kLanes + column / 2; }

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t divide_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }

// Elements of x that one multiplication takes, and the type that x must have.
#if GRAFTWORK_PAIRS
using PairRow = bf16;  // multiplied as pairs of bf16
#else
using PairRow = float;
#endif

template <class W>
struct RowOf;
template <>
struct RowOf<bf16> {
    using type = PairRow;
};
template <>
struct RowOf<float> {
    using type = float;
};

// acc[row][column vector] += x[row] · panel, for `in` features (even for bf16); `num_panels` panels lie `panel_stride` elements
// apart.
template <int kRows, int kPanels, class W>
struct Tile {
    static constexpr int kColumns = 2 * kPanels;  // vectors
    Vec acc[kRows][kColumns];

    void clear() {
        for (int row = 0; row < kRows; ++row)
            for (int column = 0; column < kColumns; ++column) acc[row][column] = Vec{};
    }

    void add(const typename RowOf<W>::type* x, int64_t x_stride, const W* panels, int64_t panel_stride, int64_t in);
};

// One k: a vector of w for each column vector, an element of x for each row. Whichever are fewer wait in registers for the others.
template <int kRows, int kPanels, class W, class Load>
inline void add_outer(Tile<kRows, kPanels, W>& tile, const float* x, int64_t x_stride, Load&& load_columns) {
    constexpr int kColumns = 2 * kPanels;
    if constexpr (kRows < kColumns) {
        Vec element[kRows];
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) element[row] = splat(x[row * x_stride]);
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column) {
            const Vec w = load_columns(column);
#pragma GCC unroll 12
            for (int row = 0; row < kRows; ++row) tile.acc[row][column] = fma(element[row], w, tile.acc[row][column]);
        }
    } else {
        Vec w[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column) w[column] = load_columns(column);
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
            const Vec element = splat(x[row * x_stride]);
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; ++column) tile.acc[row][column] = fma(element, w[column], tile.acc[row][column]);
        }
    }
}

template <int kRows, int kPanels>
inline void add_panels(Tile<kRows, kPanels, float>& tile, const float* x, int64_t x_stride, const float* panels, int64_t panel_stride,
                       int64_t in) {
    for (int64_t k = 0; k < in; ++k, panels += kPanel)
        add_outer(tile, x + k, x_stride, [&](int column) {
            return load(panels + (column / 2) * panel_stride + (column % 2) * kLanes);
        });
}

#if GRAFTWORK_PAIRS

// acc + w.first * x.first + w.second * x.second for the pair of bf16 in each lane of w, and the one in x.
inline Vec dot_pairs(Vec acc, Bits w, uint32_t x) {
#if defined(__AVX512BF16__) && GRAFTWORK_LANES == 16
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
#else
    const uint32_t low = x << 16, high = x & 0xffff0000u;
    acc = fma(reinterpret_cast<Vec>(w << 16), splat(load_as<float>(&low)), acc);
    return fma(reinterpret_cast<Vec>(w & 0xffff0000u), splat(load_as<float>(&high)), acc);
#endif
}

template <int kRows, int kPanels>
inline void add_panels(Tile<kRows, kPanels, bf16>& tile, const bf16* x, int64_t x_stride, const bf16* panels, int64_t panel_stride,
                       int64_t in) {
    constexpr int kColumns = 2 * kPanels;
    for (int64_t k = 0; k < in; k += 2, panels += 2 * kPanel) {
        Bits w[kColumns];
#pragma GCC unroll 8
        for (int column = 0; column < kColumns; ++column)
            w[column] = load_as<Bits>(panels + (column / 2) * panel_stride + (column % 2) * 2 * kLanes);
#pragma GCC unroll 12
        for (int row = 0; row < kRows; ++row) {
            const uint32_t pair = load_as<uint32_t>(x + row * x_stride + k);
#pragma GCC unroll 8
            for (int column = 0; column < kColumns; ++column)
                tile.acc[row][column] = dot_pairs(tile.acc[row][column], w[column], pair);
        }
    }
}

#else

// A vector of words holds two ks of its columns: the first in the lower halves, the second in the upper ones.
template <int kRows, int kPanels>
inline void add_panels(Tile<kRows, kPanels, bf16>& tile, const float* x, int64_t x_stride, const bf16* panels, int64_t panel_stride,
                       int64_t in) {
    for (int64_t k = 0; k < in; k += 2, panels += 2 * kPanel) {
        const auto words = [&](int column) {
            return load_as<Bits>(panels + (column / 2) * panel_stride + (column % 2) * 2 * kLanes);
        };
        add_outer(tile, x + k, x_stride, [&](int column) { return reinterpret_cast<Vec>(words(column) << 16); });
        add_outer(tile, x + k + 1, x_stride, [&](int column) { return reinterpret_cast<Vec>(words(column) & 0xffff0000u); });
    }
}

#endif

template <int kRows, int kPanels, class W>
inline void Tile<kRows, kPanels, W>::add(const typename RowOf<W>::type* x, int64_t x_stride, const W* panels, int64_t panel_stride,
                                         int64_t in) {
    add_panels(*this, x, x_stride, panels, panel_stride, in);
}

}  // namespace graftwork
