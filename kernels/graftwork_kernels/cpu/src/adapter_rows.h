// A step's rows with the adapters that they use: h = x Aᵀ of every row, and what each adds to a tile of a product.
//
// Rows stand in the order of the step's permutation, so that those of one adapter are neighbours, a run, and read it once.
//
// Where adapters have few rows each, reading them is all the work: a task takes some rows of one and reads its A and B from end to end.
// Where they have many, B's columns are read once for all of them, when a tile of the product is completed; and where there are too few
// such tasks to go round, a task is a part of one.

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

    // The step's row that stands at a place of the order; its adapter, negative for the base.
    int64_t row_at_place(int64_t place) const { return any() ? sites_.rows.permutation[place] : place; }
    int64_t adapter_at(int64_t place) const { return any() ? sites_.rows.token_adapter[row_at_place(place)] : -1; }

    // body(adapter, place, length) for the runs of `count` places from `place` on.
    template <class Body>
    void for_runs(int64_t place, int64_t count, Body&& body) const {
        for (const int64_t end = place + count; place < end;) {
            const int64_t length = run_length(place, end - place);
            body(adapter_at(place), place, length);
            place += length;
        }
    }

    SiteRecord record(int64_t adapter, int64_t site) const { return record_of(sites_.memory, adapter, sites_.sites[site], step_); }
    const Site& site(int64_t number) const { return sites_.sites[number]; }
    int64_t num_sites() const { return sites_.count; }

    // Whether an adapter has any delta here.
    bool has_delta(int64_t adapter) const {
        for (int64_t site = 0; adapter >= 0 && site < sites_.count; ++site)
            if (record(adapter, site).rank > 0) return true;
        return false;
    }

    // Where `delta` has room for all rows and columns: decide on a way.
    void begin(int team_size, Delta delta, int64_t num_columns);
    // Each round takes kRankChunk ranks more, of all rows; a round's tasks of `shrink`.
    int64_t num_rounds() const { return way_ == Way::kWhole || most_ranks_ <= kRankChunk ? 1 : divide_up(most_ranks_, kRankChunk); }
    int64_t begin_round(int64_t round);
    // h of some ranks of some rows. `widen(row, to)` writes a row of x as fp32; `tile` has room for kTileRows of them, `stride` apart. Of
    // one thread in one round the tasks ascend; what `next_task` will read is fetched meanwhile.
    template <class Widen>
    void shrink(int64_t task, int64_t next_task, float* tile, int64_t stride, Widen&& widen);
    // Whether after a round's shrinks come calls of `add_round`, in pieces of the columns.
    bool adds_in_rounds() const { return way_ == Way::kRounds; }
    void add_round(int64_t num_rows, int64_t column, int64_t num_columns) const;

    // Whether the product's tasks add up the delta; else it is there.
    bool adds_later() const { return any() && way_ == Way::kLater; }
    const Delta& delta() const { return delta_; }
    // Ask for an adapter's scales and biases of these columns, and for what `add` will read if the delta is added up later.
    void prefetch(int64_t adapter, int64_t column, int64_t num_columns) const;
    // Add this round's ranks to some columns of each row of a run, which begin at `to`.
    void add(int64_t adapter, int64_t place, int64_t count, int64_t column, int64_t num_columns, Delta to) const;
    // A site's output scale or bias, or null.
    const uint8_t* values(int64_t row, int64_t site) const {
        return row < 0 ? nullptr : row_at(sites_.memory, row, kFp32, sites_.sites[site].size, step_);
    }

private:
    // How h Bᵀ comes about: by the task that has h; in rounds, as h has room for no more ranks at a time; or by the product's tasks.
    enum class Way { kWhole, kRounds, kLater };
    struct Place {
        int64_t segment = 0, first_task = 0;
    };
    struct Part {  // a block of ranks of a site
        SiteRecord record;
        int64_t site, rank;
    };

    // Places from `place` on, of `count` at most, that have the same adapter.
    int64_t run_length(int64_t place, int64_t count) const {
        if (!any()) return count;
        const int64_t adapter = adapter_at(place);
        int64_t length = 1;
        while (length < count && adapter_at(place + length) == adapter) ++length;
        return length;
    }
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
    const uint8_t* a_of(const SiteRecord& record, int64_t rank) const { return begin_of(record.a_row + first_rank_ + rank); }
    const uint8_t* begin_of(int64_t row) const;
    void prefetch_row(int64_t row, int64_t type, int64_t first, int64_t last) const;
    const uint8_t* after_site(int64_t adapter, int64_t site, const uint8_t* next) const;
    void shrink_part(const Part& part, int64_t begin, int64_t end, const float* x, int64_t x_stride, const uint8_t* next) const;
    void add_whole(int64_t adapter, int64_t begin, int64_t end, const float* x, int64_t x_stride, const uint8_t* next);
    void add_site(const SiteRecord& record, int64_t site, int64_t place, int64_t count, int64_t column, int64_t num_columns, Delta to,
                  const uint8_t* next) const;
    RankRows rank_rows(const SiteRecord& record) const {
        return {sites_.memory.pool, sites_.memory.row_offset + record.b_row + first_rank_, ranks_in(record)};
    }
    float* h(int64_t place, int64_t site) const { return sites_.h + (place * sites_.count + site) * kRankChunk; }
    // Whether something met an address outside memory: then nothing is added.
    bool is_broken() const { return __atomic_load_n(&step_.fault, __ATOMIC_RELAXED) != 0; }

    const AdapterSites& sites_;
    int64_t num_in_;
    Step& step_;
    int64_t num_segments_;
    int64_t most_ranks_ = 0;
    int64_t first_rank_ = 0;
    Way way_ = Way::kLater;
    bool in_parts_ = false;
    Delta delta_{};
    int64_t num_columns_ = 0;
    Place place_;  // where the last task was found
};

constexpr int64_t kFewRows = 8;  // of an adapter: to read it takes longer than to multiply

// A task is a tile of a segment's rows; or, where these are too few to go round, one part of it: some ranks of one site.
inline void Adapters::begin(int team_size, Delta delta, int64_t num_columns) {
    delta_ = delta, num_columns_ = num_columns;
    int64_t num_tiles = 0;
    for (int64_t segment = 0; segment < num_segments_; ++segment) num_tiles += tiles_of(segment);
    in_parts_ = num_tiles < 2 * team_size;
    if (!in_parts_ && segment_begin(num_segments_) - segment_begin(0) < kFewRows * num_segments_)
        way_ = Way::kWhole;
    else
        way_ = most_ranks_ > kRankChunk ? Way::kRounds : Way::kLater;
}

inline int64_t Adapters::begin_round(int64_t round) {
    first_rank_ = round * kRankChunk;
    place_ = Place{};
    int64_t num_tasks = 0;
    for (int64_t segment = 0; segment < num_segments_; ++segment)
        num_tasks += tiles_of(segment) * (in_parts_ ? parts_of(segment) : 1);
    return num_tasks;
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
    if (way_ == Way::kWhole) return add_whole(adapter_of(segment), begin, end, tile, stride, a_of_task(next_task));
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

// All ranks of an adapter for some rows. Its rows are read site by site, A before B, which is how they usually lie.
inline void Adapters::add_whole(int64_t adapter, int64_t begin, int64_t end, const float* x, int64_t x_stride, const uint8_t* next) {
    if (!has_delta(adapter)) return;
    for (int64_t place = begin; place < end; ++place) std::memset(delta_.at(place, 0), 0, num_columns_ * sizeof(float));
    for (int64_t site = 0; site < sites_.count; ++site) {
        const SiteRecord found = record(adapter, site);
        for (first_rank_ = 0; first_rank_ < found.rank && !is_broken(); first_rank_ += kRankChunk) {
            const int64_t num_ranks = ranks_in(found);
            for (int64_t rank = 0; rank < num_ranks; rank += kRankBlock) {
                const bool is_last = rank + kRankBlock >= num_ranks;
                shrink_part({found, site, rank}, begin, end, x, x_stride,
                            is_last ? begin_of(found.b_row + first_rank_) : a_of(found, rank + kRankBlock));
            }
            const bool is_last = first_rank_ + kRankChunk >= found.rank;
            add_site(found, site, begin, end - begin, 0, num_columns_, {delta_.at(begin, 0), delta_.stride},
                     is_last ? after_site(adapter, site, next) : a_of(found, kRankChunk));
        }
    }
    first_rank_ = 0;
}

// What is read after a site: the next one's A, or what the next task begins with.
inline const uint8_t* Adapters::after_site(int64_t adapter, int64_t site, const uint8_t* next) const {
    for (++site; site < sites_.count; ++site)
        if (const SiteRecord found = record(adapter, site); found.rank > 0) return begin_of(found.a_row);
    return next;
}

// Where a row begins, or anywhere: it is but a hint of what to fetch.
inline const uint8_t* Adapters::begin_of(int64_t row) const {
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
    const uint8_t *a[kRankBlock], *b[kRankBlock];
    for (int64_t i = 0; i < num_ranks; ++i) {
        a[i] = row_at(sites_.memory, record.a_row + first_rank_ + rank + i, record.row_type, num_in_, step_);
        b[i] = row_at(sites_.memory, record.b_row + first_rank_ + rank + i, record.row_type, sites_.sites[site].size, step_);
        if (a[i] == nullptr || b[i] == nullptr) return;
        if (has_scale(record.row_type)) __builtin_prefetch(b[i]);
    }
    float* to = h(begin, site) + rank;
    const int64_t h_stride = sites_.count * kRankChunk;
    with_row_type(record.row_type, [&](auto type) {
        with_count<kTileRows>(end - begin, [&](auto members) {
            dot_rows<type.value, members.value>(a, num_ranks, x, x_stride, num_in_, to, h_stride, next);
        });
    });
    if (!has_scale(record.row_type)) return;
    for (int64_t i = 0; i < num_ranks; ++i) {
        const float scale = record.row_type == kInt8 ? RowReader<kInt8>::scale(b[i]) : RowReader<kE4m3>::scale(b[i]);
        for (int64_t member = 0; member < end - begin; ++member) to[member * h_stride + i] *= scale;
    }
}

inline void Adapters::prefetch(int64_t adapter, int64_t column, int64_t num_columns) const {
    if (is_broken()) return;
    for (int64_t number = 0; number < sites_.count; ++number) {
        const Site& place = sites_.sites[number];
        const int64_t first = column > place.start ? column - place.start : 0;
        const int64_t end = column + num_columns - place.start, last = end < place.size ? end : place.size;
        if (first >= last) continue;
        const SiteRecord found = record(adapter, number);
        prefetch_row(found.scale_row, kFp32, first, last);
        prefetch_row(found.bias_row, kFp32, first, last);
        for (int64_t rank = 0; adds_later() && rank < ranks_in(found); ++rank)
            prefetch_row(found.b_row + first_rank_ + rank, found.row_type, first, last);
    }
}

// Some columns of a row; of a number that is no row's, nothing.
inline void Adapters::prefetch_row(int64_t row, int64_t type, int64_t first, int64_t last) const {
    if (row < 0 || row >= sites_.memory.num_rows) return;
    const uint8_t* begin = begin_of(row);
    const int64_t end = row_bytes(type, last);
    for (int64_t line = row_bytes(type, first) / kLine * kLine; line < end; line += kLine) __builtin_prefetch(begin + line);
}

inline void Adapters::add_round(int64_t num_rows, int64_t column, int64_t num_columns) const {
    for_runs(0, num_rows, [&](int64_t adapter, int64_t place, int64_t length) {
        if (!has_delta(adapter)) return;
        for (int64_t i = place; first_rank_ == 0 && i < place + length; ++i)
            std::memset(delta_.at(i, column), 0, num_columns * sizeof(float));
        add(adapter, place, length, column, num_columns, {delta_.at(place, column), delta_.stride});
    });
}

inline void Adapters::add(int64_t adapter, int64_t place, int64_t count, int64_t column, int64_t num_columns, Delta to) const {
    if (is_broken()) return;
    for (int64_t number = 0; number < sites_.count; ++number) {
        const Site& candidate = sites_.sites[number];
        if (candidate.start >= column + num_columns || candidate.start + candidate.size <= column) continue;
        const SiteRecord found = record(adapter, number);
        if (ranks_in(found) > 0) add_site(found, number, place, count, column, num_columns, to, nullptr);
    }
}

inline void Adapters::add_site(const SiteRecord& record, int64_t site, int64_t place, int64_t count, int64_t column,
                               int64_t num_columns, Delta to, const uint8_t* next) const {
    if (is_broken()) return;
    const RankRows b = rank_rows(record);
    const int64_t start = sites_.sites[site].start - column, end = start + sites_.sites[site].size;
    const int64_t first = start < 0 ? 0 : start, last = end < num_columns ? end : num_columns;
    const int64_t h_stride = sites_.count * kRankChunk, num_tiles = divide_up(count, kTileRows), width = last - first;
    with_row_type(record.row_type, [&](auto type) {
        for (int64_t tile = 0; tile < num_tiles; ++tile) {
            const int64_t begin = tile * count / num_tiles, members = (tile + 1) * count / num_tiles - begin;
            const float* factors = h(place + begin, site);
            with_count<kTileRows>(members, [&](auto known) {
                add_rows<type.value, known.value>(b, first - start, width, factors, h_stride, {to.at(begin, first), to.stride}, next);
            });
        }
    });
}

}  // namespace graftwork
