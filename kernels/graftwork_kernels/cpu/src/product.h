// Rows times a weight in panels: the tiles of a few panels, and which of them make up a task.

#pragma once

#include "step.h"
#include "tile.h"

namespace graftwork {

// A weight as `prepare_weight` laid it out: panels one after the other, `in` rounded up to whole pairs for bf16, columns to whole
// panels.
template <class W>
struct Panels {
    const W* data;
    int64_t in;
    int64_t out;

    static int64_t padded(int64_t in) { return sizeof(W) == 2 ? round_up(in, 2) : in; }
    int64_t stride() const { return padded(in) * kPanel; }
    int64_t count() const { return divide_up(out, kPanel); }
};

// Rows that a product reads, `stride` elements apart.
template <class X>
struct Rows {
    const X* data;
    int64_t stride;

    const X* at(int64_t row) const { return data + row * stride; }
};

constexpr int64_t kMostPanels = 8;

// How many panels one task takes: enough to reuse a tile of rows while it is in the nearest cache, few enough to deal evenly.
inline int64_t panels_per_task(int64_t num_panels, int64_t panel_bytes, int team_size) {
    const int64_t fits = (int64_t{160} << 10) / panel_bytes;
    const int64_t deals = num_panels / (int64_t{4} * team_size);
    int64_t most = fits < deals ? fits : deals;
    most = most < 1 ? 1 : (most > kMostPanels ? kMostPanels : most);
    for (int64_t count = most; count > most / 2; --count)
        if (divide_up(num_panels, count) % team_size == 0) return count;
    return most;
}

// Panels that a tile of so many rows takes at once, so that its accumulators fill the registers.
constexpr int panels_at_once(int num_rows) {
    const int panels = kTileRows / num_rows;
    return panels > 4 ? 4 : (panels < 1 ? 1 : panels);
}

// Multiply kRows rows with panels first .. last of the weight; take(row, count, panel, count, vectors) gets the sums, panels
// counted from the weight's panel `origin`, rows one behind the other.
template <int kRows, int kPanels, class W, class Sink>
inline void multiply_tile(const Panels<W>& weight, Rows<typename RowOf<W>::type> rows, int64_t row, int64_t origin, int64_t first,
                          int64_t last, Sink& sink) {
    for (; first + kPanels <= last; first += kPanels) {
        Tile<kRows, kPanels, W> tile;
        tile.clear();
        tile.add(rows.at(row), rows.stride, weight.data + first * weight.stride(), weight.stride(), weight.padded(weight.in));
        Vec sums[kRows][2 * kPanels];  // a copy: what the tile holds stays in registers as long as nobody has its address
#pragma GCC unroll 12
        for (int member = 0; member < kRows; ++member)
#pragma GCC unroll 8
            for (int column = 0; column < 2 * kPanels; ++column) sums[member][column] = tile.acc[member][column];
        sink.take(row, kRows, first - origin, kPanels, sums[0]);
    }
    if constexpr (kPanels > 1) multiply_tile<kRows, kPanels - 1>(weight, rows, row, origin, first, last, sink);
}

template <int kRows, class W, class Sink>
inline void multiply_rows(int num_rows, const Panels<W>& weight, Rows<typename RowOf<W>::type> rows, int64_t row, int64_t first,
                          int64_t last, Sink& sink) {
    if (num_rows == kRows)
        multiply_tile<kRows, panels_at_once(kRows)>(weight, rows, row, first, first, last, sink);
    else if constexpr (kRows > 1)
        multiply_rows<kRows - 1>(num_rows, weight, rows, row, first, last, sink);
}

// All rows times panels first .. last. Rows go in tiles of nearly equal height, since a low tile costs almost as much as a high
// one. A sink is told which rows come next by expect(row, count), so that it can fetch what it will need, and then takes their
// sums.
template <class W, class Sink>
inline void multiply(const Panels<W>& weight, Rows<typename RowOf<W>::type> rows, int64_t num_rows, int64_t first, int64_t last,
                     Sink& sink) {
    const int64_t num_tiles = divide_up(num_rows, kTileRows);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
        const int64_t begin = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
        sink.expect(begin, end - begin);
        multiply_rows<kTileRows>(static_cast<int>(end - begin), weight, rows, begin, first, last, sink);
    }
}

}  // namespace graftwork
