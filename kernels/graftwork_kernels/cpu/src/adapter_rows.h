// A step's rows with the adapters that they use: h = x Aᵀ of every row, and what each adds to a tile of a product.
//
// Rows stand in the order of the step's permutation, so that those of one adapter are neighbours, a run, and read it once.

#pragma once

#include "adapter.h"

namespace graftwork {

// The rows of a step grouped by adapter, as layout.AdapterBatch says.
struct AdapterRows {
    const int32_t* token_adapter;
    const int64_t* permutation;
    const int32_t* segment_start;
    const int32_t* segment_adapter;
    const int32_t* num_segments;
};

// A linear's projections, and where its adapters' work is kept between its two halves.
struct AdapterSites {
    const Site* sites;
    int64_t count;
    AdapterMemory memory;
    AdapterRows rows;
    float* h;  // scratch [rows, sites, kRankChunk]
};

constexpr int64_t kRankBlock = 8;  // rows of A in one task

class Adapters {
public:
    Adapters(const AdapterSites& sites, int64_t num_in, Step& step)
        : sites_(sites), num_in_(num_in), step_(step), num_segments_(sites.count > 0 ? *sites.rows.num_segments : 0) {
        for (int64_t segment = 0; segment < num_segments_; ++segment)
            for (int64_t site = 0; site < sites.count; ++site) {
                const SiteRecord found = record(sites.rows.segment_adapter[segment], site);
                if (found.rank > sites.memory.num_rows || (found.rank > 0 && !is_row_type(found.row_type)))
                    report(step, kRowOutside);  // nobody is to count through so many
                else if (found.rank > most_ranks_)
                    most_ranks_ = found.rank;
            }
    }

    bool any() const { return num_segments_ > 0; }
    int64_t num_rounds() const { return most_ranks_ <= kRankChunk ? 1 : divide_up(most_ranks_, kRankChunk); }

    // The step's row that stands at a place of the order; its adapter, negative for the base.
    int64_t row_at_place(int64_t place) const { return any() ? sites_.rows.permutation[place] : place; }
    int64_t adapter_at(int64_t place) const { return any() ? sites_.rows.token_adapter[row_at_place(place)] : -1; }

    // Places from `place` on, of `count` at most, that have the same adapter.
    int64_t run_length(int64_t place, int64_t count) const {
        if (!any()) return count;
        const int64_t adapter = adapter_at(place);
        int64_t length = 1;
        while (length < count && adapter_at(place + length) == adapter) ++length;
        return length;
    }

    SiteRecord record(int64_t adapter, int64_t site) const { return record_of(sites_.memory, adapter, sites_.sites[site], step_); }
    const Site& site(int64_t number) const { return sites_.sites[number]; }
    int64_t num_sites() const { return sites_.count; }

    // Begin with the ranks from round * kRankChunk on, of all rows; the number of tasks that compute their h.
    int64_t begin_round(int64_t round, int team_size);
    // h of some ranks of some rows. `widen(row, to)` gives a row of x as dot_tile reads it; `tile` has room for kTileRows of them, `stride`
    // apart. Of one thread in one round the tasks ascend; what `next_task` will read is fetched meanwhile.
    template <class Widen>
    void shrink(int64_t task, int64_t next_task, float* tile, int64_t stride, Widen&& widen);

    // After all of a round's tasks: where one met an address outside memory, nothing is added.
    void end_shrink() { broken_ = __atomic_load_n(&step_.fault, __ATOMIC_RELAXED) != 0; }

    // Ask for what `add` will read for these columns.
    void prefetch(int64_t adapter, int64_t column, int64_t num_columns) const;
    // Add this round's ranks to some columns of each row of a run.
    void add(int64_t adapter, int64_t place, int64_t count, int64_t column, int64_t num_columns, Sums sums) const;
    // A site's output scale or bias, or null.
    const uint8_t* values(int64_t row, int64_t site) const {
        return row < 0 ? nullptr : row_at(sites_.memory, row, kFp32, sites_.sites[site].size, step_);
    }

private:
    struct Place {
        int64_t segment = 0, first_task = 0;
    };
    struct Part {  // a block of ranks of a site
        SiteRecord record;
        int64_t site, rank;
    };

    int64_t segment_begin(int64_t segment) const { return sites_.rows.segment_start[segment]; }
    int64_t segment_size(int64_t segment) const { return segment_begin(segment + 1) - segment_begin(segment); }
    int64_t ranks_in(const SiteRecord& record) const {
        const int64_t left = record.rank - first_rank_;
        return left < 0 ? 0 : (left > kRankChunk ? kRankChunk : left);
    }
    int64_t tiles_of(int64_t segment) const { return divide_up(segment_size(segment), kTileRows); }
    int64_t parts_of(int64_t segment) const;
    int64_t adapter_of(int64_t segment) const { return sites_.rows.segment_adapter[segment]; }
    void find(int64_t task, Place& place) const;
    const uint8_t* a_of_task(int64_t task) const;
    const uint8_t* a_of(const SiteRecord& record, int64_t rank) const;
    void shrink_part(const Part& part, int64_t begin, int64_t end, const float* x, int64_t x_stride, const uint8_t* next) const;
    void add_site(const SiteRecord& record, int64_t site, int64_t place, int64_t count, int64_t column, int64_t num_columns,
                  Sums sums) const;
    RankRows rank_rows(const SiteRecord& record) const {
        return {sites_.memory.pool, sites_.memory.row_offset + record.b_row + first_rank_, ranks_in(record)};
    }
    float* h(int64_t place, int64_t site) const { return sites_.h + (place * sites_.count + site) * kRankChunk; }

    const AdapterSites& sites_;
    int64_t num_in_;
    Step& step_;
    int64_t num_segments_;
    int64_t most_ranks_ = 0;
    int64_t first_rank_ = 0;
    bool in_parts_ = false;
    bool broken_ = false;
    Place place_;  // where the last task was found
};

// A task is a tile of a segment's rows; or, where these are too few to go round, one part of it: some ranks of one site.
inline int64_t Adapters::begin_round(int64_t round, int team_size) {
    first_rank_ = round * kRankChunk;
    place_ = Place{};
    int64_t num_tiles = 0, num_parts = 0;
    for (int64_t segment = 0; segment < num_segments_; ++segment) {
        num_tiles += tiles_of(segment);
        num_parts += tiles_of(segment) * parts_of(segment);
    }
    in_parts_ = num_tiles < 2 * team_size;
    return in_parts_ ? num_parts : num_tiles;
}

inline int64_t Adapters::parts_of(int64_t segment) const {
    int64_t total = 0;
    for (int64_t site = 0; site < sites_.count; ++site)
        total += divide_up(ranks_in(record(adapter_of(segment), site)), kRankBlock);
    return total;
}

inline void Adapters::find(int64_t task, Place& place) const {
    for (; place.segment < num_segments_; ++place.segment) {
        const int64_t count = tiles_of(place.segment) * (in_parts_ ? parts_of(place.segment) : 1);
        if (task < place.first_task + count) return;
        place.first_task += count;
    }
}

template <class Widen>
inline void Adapters::shrink(int64_t task, int64_t next_task, float* tile, int64_t stride, Widen&& widen) {
    find(task, place_);
    const int64_t segment = place_.segment, size = segment_size(segment), tiles = tiles_of(segment);
    const int64_t number = (task - place_.first_task) % tiles, wanted = (task - place_.first_task) / tiles;
    const int64_t begin = segment_begin(segment) + number * size / tiles, end = segment_begin(segment) + (number + 1) * size / tiles;
    for (int64_t place = begin; place < end; ++place) widen(row_at_place(place), tile + (place - begin) * stride);
    Part last{};
    int64_t part = 0;
    for (int64_t site = 0; site < sites_.count; ++site) {
        const SiteRecord found = record(adapter_of(segment), site);
        for (int64_t rank = 0; rank < ranks_in(found); rank += kRankBlock, ++part) {
            if (in_parts_ && part != wanted) continue;
            if (last.record.rank > 0) shrink_part(last, begin, end, tile, stride, a_of(found, rank));
            last = {found, site, rank};
        }
    }
    if (last.record.rank > 0) shrink_part(last, begin, end, tile, stride, a_of_task(next_task));
}

// Where some rows of A begin, or anywhere: it is but a hint of what to fetch.
inline const uint8_t* Adapters::a_of(const SiteRecord& record, int64_t rank) const {
    const int64_t row = record.a_row + first_rank_ + rank;
    return sites_.memory.pool + (row >= 0 && row < sites_.memory.num_rows ? sites_.memory.row_offset[row] : 0);
}

// The same for what a later task begins with.
inline const uint8_t* Adapters::a_of_task(int64_t task) const {
    Place place = place_;
    find(task, place);
    int64_t part = in_parts_ && place.segment < num_segments_ ? (task - place.first_task) / tiles_of(place.segment) : 0;
    for (int64_t site = 0; place.segment < num_segments_ && site < sites_.count; ++site) {
        const SiteRecord found = record(adapter_of(place.segment), site);
        const int64_t blocks = divide_up(ranks_in(found), kRankBlock);
        if (part < blocks) return a_of(found, part * kRankBlock);
        part -= blocks;
    }
    return sites_.memory.pool;
}

// Looks at the addresses of A and of B: those of B are read without another look, so a fault here must end the linear's adapter
// work.
inline void Adapters::shrink_part(const Part& part, int64_t begin, int64_t end, const float* x, int64_t x_stride,
                                  const uint8_t* next) const {
    const auto& [record, site, rank] = part;
    const int64_t left = ranks_in(record) - rank, num_ranks = left < kRankBlock ? left : kRankBlock;
    const uint8_t* a[kRankBlock];
    for (int64_t i = 0; i < num_ranks; ++i) {
        a[i] = row_at(sites_.memory, record.a_row + first_rank_ + rank + i, record.row_type, num_in_, step_);
        const uint8_t* b =
            row_at(sites_.memory, record.b_row + first_rank_ + rank + i, record.row_type, sites_.sites[site].size, step_);
        if (a[i] == nullptr || b == nullptr) return;
    }
    float* to = h(begin, site) + rank;
    const int64_t h_stride = sites_.count * kRankChunk;
    with_row_type(record.row_type, [&](auto type) {
        with_count<kTileRows>(end - begin, [&](auto members) {
            dot_rows<type.value, members.value>(a, num_ranks, x, x_stride, num_in_, to, h_stride, next);
        });
    });
}

inline void Adapters::prefetch(int64_t adapter, int64_t column, int64_t num_columns) const {
    if (broken_) return;
    for (int64_t number = 0; number < sites_.count; ++number) {
        const Site& place = sites_.sites[number];
        const int64_t first = column - place.start;
        if (first < 0 || first >= place.size) continue;
        const SiteRecord found = record(adapter, number);
        const int64_t begin = row_bytes(found.row_type, first), end = row_bytes(found.row_type, first + num_columns);
        const RankRows b = rank_rows(found);
        for (int64_t line = round_up(begin, kLine); line < end; line += kLine)
            for (int64_t rank = 0; rank < b.count; ++rank) __builtin_prefetch(b.at(rank) + line);
    }
}

inline void Adapters::add(int64_t adapter, int64_t place, int64_t count, int64_t column, int64_t num_columns,
                          Sums sums) const {
    if (broken_) return;
    for (int64_t number = 0; number < sites_.count; ++number) {
        const Site& candidate = sites_.sites[number];
        if (candidate.start >= column + num_columns || candidate.start + candidate.size <= column) continue;
        const SiteRecord found = record(adapter, number);
        if (ranks_in(found) > 0) add_site(found, number, place, count, column, num_columns, sums);
    }
}

inline void Adapters::add_site(const SiteRecord& record, int64_t site, int64_t place, int64_t count, int64_t column,
                               int64_t num_columns, Sums sums) const {
    const RankRows b = rank_rows(record);
    const int64_t start = sites_.sites[site].start - column, end = start + sites_.sites[site].size;
    const int64_t first = start < 0 ? 0 : start, last = end < num_columns ? end : num_columns;
    const int64_t h_stride = sites_.count * kRankChunk, num_tiles = divide_up(count, kTileRows), width = last - first;
    with_row_type(record.row_type, [&](auto type) {
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t begin = tile * count / num_tiles, members = (tile + 1) * count / num_tiles - begin;
            const Sums rows{sums.panel(begin, 0), sums.stride};
            const float* factors = h(place + begin, site);
            with_count<kTileRows>(members, [&](auto known) {
                add_ranks<type.value, known.value>(b, first - start, width, factors, h_stride, rows, first);
            });
        }
    });
}

}  // namespace graftwork
