// Attention of several rows of one request: flash attention (Dao et al., 2022), a tile of queries against one tile of keys after
// the other, with running maxima and sums.
//
// Key tiles begin at multiples of kKeyTile of the context, and every sum runs over keys in ascending order. So a row's result
// depends on its own position alone: not on the rows beside it in the tile, nor on where a prompt has been cut in chunks.

#pragma once

#include "attention.h"

namespace graftwork {

constexpr int64_t kKeyTile = 64;
constexpr int64_t kTileQueries = 96;  // query rows times the heads that share a key head, about
static_assert(kKeyTile % kPanel == 0 && kKeyTile % kWeightUnit == 0);

inline int64_t rows_per_tile(const AttentionArguments& a) { return std::max<int64_t>(1, kTileQueries / a.group()); }

template <class T>
class PrefillTask {
public:
    // Rows first .. first + rows_per_tile of the request, as far as it has them, before the key head `kv_head`.
    PrefillTask(const AttentionArguments& arguments, Step& step, const Request& request, int64_t first, int64_t kv_head,
                float* memory)
        : a_(arguments), step_(step), request_(request), kv_head_(kv_head), first_row_(request.first_row + first),
          first_position_(request.context - request.num_rows + first),
          num_queries_(std::min(rows_per_tile(a_), request.num_rows - first) * a_.group()),
          height_(round_up(num_queries_, kTileRows)), width_(round_up(a_.head_dim, kPanel)), work_(memory),
          queries_(work_.take(height_ * a_.head_dim)), keys_(work_.take(kKeyTile * a_.head_dim)),
          values_(work_.take(kKeyTile * width_)), sums_(work_.take(height_ * width_)), scores_(work_.take(kTileRows * kKeyTile)),
          max_(work_.take(height_)), total_(work_.take(height_)) {}

    // Floats that a task works in.
    static int64_t workspace(const AttentionArguments& a) {
        const int64_t height = round_up(rows_per_tile(a) * a.group(), kTileRows), width = round_up(a.head_dim, kPanel);
        return height * (a.head_dim + width + 2) + kKeyTile * (a.head_dim + width) + kTileRows * kKeyTile;
    }

    void attend() {
        load_queries();
        std::fill_n(sums_, height_ * width_, 0.0f);
        std::fill_n(max_, height_, -std::numeric_limits<float>::infinity());
        std::fill_n(total_, height_, 0.0f);
        const int64_t visible = position(num_queries_ - 1) + 1;
        for (int64_t start = 0; start < visible; start += kKeyTile)
            if (!attend_keys(start, std::min(kKeyTile, visible - start))) return;
        finish();
    }

private:
    int64_t position(int64_t query) const { return first_position_ + query / a_.group(); }

    void load_queries() {
        const int64_t head_dim = a_.head_dim, group = a_.group();
        std::fill_n(queries_, height_ * head_dim, 0.0f);
        for (int64_t query = 0; query < num_queries_; ++query) {
            const int64_t row = first_row_ + query / group, head = kv_head_ * group + query % group;
            const T* from = static_cast<const T*>(a_.q) + row * a_.q_stride + head * head_dim;
            for (int64_t i = 0; i < head_dim; ++i) queries_[query * head_dim + i] = read(from + i) * a_.scale;
        }
    }

    bool attend_keys(int64_t start, int64_t count) {
        if (!locate(a_, step_, request_.number, start, count, offsets_)) return false;
        pack_keys(count);
        pack_values(count);
        for (int64_t query = 0; query < num_queries_; query += kTileRows) {
            const int64_t last = std::min(query + kTileRows, num_queries_) - 1;
            const int64_t visible = std::min(count, position(last) + 1 - start);
            if (visible > 0) attend_rows(query, start, visible);
        }
        return true;
    }

    // Panels [head_dim, kPanel] of keys, as columns. Beyond the last stands the last.
    void pack_keys(int64_t count) {
        const T* keys = static_cast<const T*>(a_.k_cache) + kv_head_ * a_.head_elements();
        for (int64_t key = 0; key < round_up(count, kPanel); ++key) {
            const T* row = keys + offsets_[std::min(key, count - 1)];
            float* column = keys_ + key / kPanel * kPanel * a_.head_dim + key % kPanel;
            for (int64_t i = 0; i < a_.head_dim; ++i) column[i * kPanel] = read(row + i);
        }
    }

    // Panels [kKeyTile, kPanel] of the columns of values, zeros beyond the last column.
    void pack_values(int64_t count) {
        const T* values = static_cast<const T*>(a_.v_cache) + kv_head_ * a_.head_elements();
        for (int64_t key = 0; key < count; ++key) {
            const T* row = values + offsets_[key];
            int64_t i = 0;
            for (; i + kPanel <= a_.head_dim; i += kPanel) {
                float* panel = values_ + i * kKeyTile + key * kPanel;
                store(panel, load(row + i));
                store(panel + kLanes, load(row + i + kLanes));
            }
            for (; i < width_; ++i)
                values_[i / kPanel * kPanel * kKeyTile + key * kPanel + i % kPanel] = i < a_.head_dim ? read(row + i) : 0.0f;
        }
    }

    // kTileRows queries against the first `visible` keys of the tile: all that the last of them may see.
    void attend_rows(int64_t query, int64_t start, int64_t visible) {
        Tile<kTileRows, 1, float> tile;
        for (int64_t key = 0; key < visible; key += kPanel) {
            tile.clear();
            tile.add(queries_ + query * a_.head_dim, a_.head_dim, keys_ + key * a_.head_dim, 0, a_.head_dim);
            for (int row = 0; row < kTileRows; ++row)
                for (int column = 0; column < 2; ++column)
                    store(scores_ + row * kKeyTile + key + column * kLanes, tile.acc[row][column]);
        }
        float rescale[kTileRows];
        soften(query, start, visible, rescale);
        for (int64_t i = 0; i < width_; i += kPanel) {
            float* sums = sums_ + query * width_ + i;
            for (int row = 0; row < kTileRows; ++row)
                for (int column = 0; column < 2; ++column)
                    tile.acc[row][column] = load(sums + row * width_ + column * kLanes) * splat(rescale[row]);
            tile.add(scores_, kKeyTile, values_ + i * kKeyTile, 0, visible);
            for (int row = 0; row < kTileRows; ++row)
                for (int column = 0; column < 2; ++column) store(sums + row * width_ + column * kLanes, tile.acc[row][column]);
        }
    }

    // Scores become weights, 0 for keys in a row's future; maxima and totals move on. What was summed before counts `rescale`
    // times.
    void soften(int64_t query, int64_t start, int64_t visible, float* rescale) {
        const int64_t padded = round_up(visible, kWeightUnit);
        for (int row = 0; row < kTileRows; ++row) {
            float* scores = scores_ + row * kKeyTile;
            const int64_t seen = std::min(visible, position(std::min(query + row, num_queries_ - 1)) + 1 - start);
            if (seen <= 0) {
                std::fill_n(scores, padded, 0.0f);
                rescale[row] = 1.0f;
                continue;
            }
            std::fill(scores + seen, scores + padded, -std::numeric_limits<float>::infinity());
            const float before = max_[query + row], top = std::max(before, largest_of(scores, padded));
            rescale[row] = exponential(splat(before - top))[0];
            max_[query + row] = top;
            total_[query + row] = total_[query + row] * rescale[row] + weights_of(scores, padded, top);
        }
    }

    void finish() {
        const int64_t group = a_.group();
        for (int64_t query = 0; query < num_queries_; ++query) {
            const int64_t row = first_row_ + query / group, head = kv_head_ * group + query % group;
            T* out = static_cast<T*>(a_.out) + (row * a_.num_heads + head) * a_.head_dim;
            for (int64_t i = 0; i < a_.head_dim; ++i) write(out + i, sums_[query * width_ + i] / total_[query]);
        }
    }

    const AttentionArguments& a_;
    Step& step_;
    const Request request_;
    const int64_t kv_head_, first_row_, first_position_;
    const int64_t num_queries_, height_, width_;  // rows times group, rounded up to whole tiles; columns of values likewise
    Workspace work_;
    float *queries_, *keys_, *values_, *sums_, *scores_, *max_, *total_;
    int64_t offsets_[kKeyTile];
};

}  // namespace graftwork
