// A linear with each row's own adapter added: y = c ⊙ (x Wᵀ + h Bᵀ) + bias, h = x Aᵀ.
//
//     widen x ─▶ product of all rows   ─▶ base rows: bias, cast, done
//                h of the first ranks     adapter rows: kept in fp32 ─▶ expand ─▶ (more ranks: h, expand) ─▶ c, bias, cast
//
// The three parts are three shared loops; the middle one deals base and adapter work together, so neither waits for the other.

#include "adapter.h"
#include "product.h"

using namespace graftwork;

namespace {

enum FloatType : int64_t { kFloat32 = 0, kBfloat16 = 1 };

constexpr int64_t kColumnBlock = 256;  // columns that one task expands: half a KB of each row of B
constexpr int64_t kMemberBlock = 48;   // rows of one segment in one task
constexpr int64_t kRankBlock = 16;     // rows of A in one task

struct LinearArguments {
    const void* x;
    int64_t x_stride;
    const void* weight;
    int64_t weight_type;  // also of x
    int64_t in, out_features;
    const void* bias;  // or null
    int64_t bias_type;
    void* out;
    int64_t out_type;
    float* wide;  // scratch [rows, wide_stride]: x in fp32, zeros up to a whole pair; x itself where that is fp32
    int64_t wide_stride;
    bf16* pairs;  // scratch [rows, in + 1]: x with a zero behind it, where `in` is odd and x bf16; else null
    float* product;  // scratch [rows, out]: adapter rows before their bias; null without adapters
    float* h;        // scratch [rows, sites, kRankChunk]
    const Site* sites;
    int64_t num_sites;
    AdapterMemory memory;
    AdapterRows rows;
};

Vec load_bias(const LinearArguments& arguments, int64_t column) {
    if (arguments.bias == nullptr) return Vec{};
    if (arguments.bias_type == kFloat32) return load(static_cast<const float*>(arguments.bias) + column);
    return load(static_cast<const bf16*>(arguments.bias) + column);
}

float bias_at(const LinearArguments& arguments, int64_t column) {
    if (arguments.bias == nullptr) return 0.0f;
    if (arguments.bias_type == kFloat32) return static_cast<const float*>(arguments.bias)[column];
    return widen(static_cast<const bf16*>(arguments.bias)[column]);
}

void write_out(const LinearArguments& arguments, int64_t row, int64_t column, float value) {
    const int64_t place = row * arguments.out_features + column;
    if (arguments.out_type == kFloat32)
        static_cast<float*>(arguments.out)[place] = value;
    else
        static_cast<bf16*>(arguments.out)[place] = narrow(value);
}

void store_out(const LinearArguments& arguments, int64_t row, int64_t column, Vec value) {
    const int64_t place = row * arguments.out_features + column;
    if (arguments.out_type == kFloat32)
        store(static_cast<float*>(arguments.out) + place, value);
    else
        store(static_cast<bf16*>(arguments.out) + place, value);
}

// A panel of one base row's product: bias and cast.
void finish_base(const LinearArguments& arguments, int64_t row, int64_t column, const Vec* panel) {
    for (int half = 0; half < 2; ++half, column += kLanes) {
        if (column + kLanes <= arguments.out_features) {
            store_out(arguments, row, column, panel[half] + load_bias(arguments, column));
            continue;
        }
        float lanes[kLanes];
        store(lanes, panel[half]);
        for (int64_t lane = 0; column + lane < arguments.out_features; ++lane)
            write_out(arguments, row, column + lane, lanes[lane] + bias_at(arguments, column + lane));
    }
}

// The same for an adapter's row: kept as it is.
void keep_product(const LinearArguments& arguments, int64_t row, int64_t column, const Vec* panel) {
    float* to = arguments.product + row * arguments.out_features;
    for (int half = 0; half < 2; ++half, column += kLanes) {
        if (column + kLanes <= arguments.out_features) {
            store(to + column, panel[half]);
            continue;
        }
        float lanes[kLanes];
        store(lanes, panel[half]);
        for (int64_t lane = 0; column + lane < arguments.out_features; ++lane) to[column + lane] = lanes[lane];
    }
}

// The adapters of a step, walked segment by segment and site by site.
class Adapters {
public:
    Adapters(const LinearArguments& arguments, Step& step)
        : arguments_(arguments), step_(step), num_segments_(arguments.num_sites > 0 ? *arguments.rows.num_segments : 0) {
        for (int64_t segment = 0; segment < num_segments_; ++segment) {
            num_member_blocks_ += member_blocks(segment);
            for (int64_t site = 0; site < arguments.num_sites; ++site) {
                const int64_t rank = record(segment, site).rank;
                most_ranks_ = rank > most_ranks_ ? rank : most_ranks_;
            }
        }
    }

    int64_t num_segments() const { return num_segments_; }
    int64_t num_rounds() const { return most_ranks_ <= kRankChunk ? 1 : divide_up(most_ranks_, kRankChunk); }
    bool has_row(int64_t row) const { return num_segments_ > 0 && arguments_.rows.token_adapter[row] >= 0; }

    SiteRecord record(int64_t segment, int64_t site) const {
        return record_of(arguments_.memory, arguments_.rows.segment_adapter[segment], arguments_.sites[site], step_);
    }

    int64_t begin(int64_t segment) const { return arguments_.rows.segment_start[segment]; }
    int64_t end(int64_t segment) const { return arguments_.rows.segment_start[segment + 1]; }
    int64_t row(int64_t member) const { return arguments_.rows.permutation[member]; }
    int64_t member_blocks(int64_t segment) const { return divide_up(end(segment) - begin(segment), kMemberBlock); }

    // Ranks of a site that a round computes.
    static int64_t ranks_in(const SiteRecord& record, int64_t round) {
        const int64_t left = record.rank - round * kRankChunk;
        return left < 0 ? 0 : (left > kRankChunk ? kRankChunk : left);
    }

    int64_t shrink_tasks(int64_t segment, int64_t site, int64_t round) const {
        return member_blocks(segment) * divide_up(ranks_in(record(segment, site), round), kRankBlock);
    }

    int64_t num_shrink_tasks(int64_t round) const {
        int64_t total = 0;
        for (int64_t segment = 0; segment < num_segments_; ++segment)
            for (int64_t site = 0; site < arguments_.num_sites; ++site) total += shrink_tasks(segment, site, round);
        return total;
    }

    int64_t num_expand_tasks() const { return num_member_blocks_ * column_blocks(); }

    // Within one shared loop a thread's tasks ascend, so each is found by walking on from the last one.
    void begin_round(int64_t round) { round_ = round, segment_ = site_ = first_task_ = 0; }
    void shrink(int64_t task);
    void expand(int64_t task);

private:
    int64_t column_blocks() const { return divide_up(arguments_.out_features, kColumnBlock); }
    void shrink_block(const SiteRecord& record, int64_t site, int64_t first_rank, int64_t begin, int64_t end) const;
    void expand_site(int64_t segment, int64_t site, int64_t begin, int64_t end, int64_t column, int64_t last) const;
    void finish(int64_t segment, int64_t begin, int64_t end, int64_t column, int64_t last) const;
    void finish_columns(const SiteRecord& record, const Site* site, int64_t row, int64_t column, int64_t last) const;
    int64_t gather_rows(const SiteRecord& record, int64_t first, int64_t count, int64_t width, const uint8_t** rows) const;
    float* h(int64_t row, int64_t site) const { return arguments_.h + (row * arguments_.num_sites + site) * kRankChunk; }

    const LinearArguments& arguments_;
    Step& step_;
    int64_t num_segments_;
    int64_t num_member_blocks_ = 0;
    int64_t most_ranks_ = 0;
    int64_t round_ = 0, segment_ = 0, site_ = 0, first_task_ = 0;  // where the last task was found
};

// Addresses of rows first .. first + count of memory; how many there are before one that lies outside.
int64_t Adapters::gather_rows(const SiteRecord& record, int64_t first, int64_t count, int64_t width, const uint8_t** rows) const {
    for (int64_t rank = 0; rank < count; ++rank) {
        rows[rank] = row_at(arguments_.memory, first + rank, record.row_type, width, step_);
        if (rows[rank] == nullptr) return rank;
    }
    return count;
}

void Adapters::shrink(int64_t task) {
    for (;;) {
        const int64_t count = shrink_tasks(segment_, site_, round_);
        if (task < first_task_ + count) break;
        first_task_ += count;
        if (++site_ == arguments_.num_sites) site_ = 0, ++segment_;
    }
    const int64_t place = task - first_task_, blocks = member_blocks(segment_);
    const int64_t first = begin(segment_) + place % blocks * kMemberBlock;
    const int64_t last = first + kMemberBlock < end(segment_) ? first + kMemberBlock : end(segment_);
    shrink_block(record(segment_, site_), site_, place / blocks * kRankBlock, first, last);
}

void Adapters::shrink_block(const SiteRecord& record, int64_t site, int64_t first_rank, int64_t begin, int64_t end) const {
    const uint8_t* a[kRankBlock];
    const float* x[kMemberBlock];
    float* to[kMemberBlock];
    const int64_t left = ranks_in(record, round_) - first_rank;
    const int64_t wanted = left < kRankBlock ? left : kRankBlock;
    const int64_t first_row = record.a_row + round_ * kRankChunk + first_rank;
    const int64_t num_ranks = gather_rows(record, first_row, wanted, arguments_.in, a);
    for (int64_t member = begin; member < end; ++member) {
        x[member - begin] = arguments_.wide + row(member) * arguments_.wide_stride;
        to[member - begin] = h(row(member), site) + first_rank;
    }
    with_row_type(record.row_type, [&](auto type) {
        int64_t rank = 0;
        for (; rank + 4 <= num_ranks; rank += 4) {
            dot_rows<type.value, 4>(a + rank, x, end - begin, arguments_.in, to);
            for (int64_t member = 0; member < end - begin; ++member) to[member] += 4;
        }
        for (; rank < num_ranks; ++rank) {
            dot_rows<type.value, 1>(a + rank, x, end - begin, arguments_.in, to);
            for (int64_t member = 0; member < end - begin; ++member) to[member] += 1;
        }
    });
}

void Adapters::expand(int64_t task) {
    while (task >= first_task_ + member_blocks(segment_) * column_blocks())
        first_task_ += member_blocks(segment_++) * column_blocks();
    const int64_t place = task - first_task_;
    const int64_t first = begin(segment_) + place / column_blocks() * kMemberBlock;
    const int64_t last = first + kMemberBlock < end(segment_) ? first + kMemberBlock : end(segment_);
    const int64_t column = place % column_blocks() * kColumnBlock;
    const int64_t column_end = column + kColumnBlock < arguments_.out_features ? column + kColumnBlock : arguments_.out_features;
    for (int64_t site = 0; site < arguments_.num_sites; ++site) expand_site(segment_, site, first, last, column, column_end);
    if (round_ + 1 == num_rounds()) finish(segment_, first, last, column, column_end);
}

void Adapters::expand_site(int64_t segment, int64_t site, int64_t begin, int64_t end, int64_t column, int64_t last) const {
    const Site& place = arguments_.sites[site];
    column = column > place.start ? column : place.start;
    last = last < place.start + place.size ? last : place.start + place.size;
    const SiteRecord site_record = record(segment, site);
    const int64_t wanted = ranks_in(site_record, round_);
    if (column >= last || wanted == 0) return;
    const uint8_t* b[kRankChunk];
    const int64_t num_ranks = gather_rows(site_record, site_record.b_row + round_ * kRankChunk, wanted, place.size, b);
    const float* factors[kMemberBlock];
    float* y[kMemberBlock];
    for (int64_t member = begin; member < end; ++member) {
        factors[member - begin] = h(row(member), site);
        y[member - begin] = arguments_.product + row(member) * arguments_.out_features + column;
    }
    with_row_type(site_record.row_type, [&](auto type) {
        const int64_t count = end - begin;
        int64_t member = 0;
        for (; member + 3 <= count; member += 3)
            axpy<type.value, 3>(b, factors + member, num_ranks, column - place.start, last - column, y + member);
        for (; member < count; ++member)
            axpy<type.value, 1>(b, factors + member, num_ranks, column - place.start, last - column, y + member);
    });
}

// Output scale, bias and cast of some columns of a segment's rows.
void Adapters::finish(int64_t segment, int64_t begin, int64_t end, int64_t column, int64_t last) const {
    while (column < last) {
        const Site* place = nullptr;
        SiteRecord site_record = kNoSite;
        int64_t until = last;  // of the columns that the same site covers, or no site
        for (int64_t site = 0; site < arguments_.num_sites; ++site) {
            const Site& candidate = arguments_.sites[site];
            const int64_t site_end = candidate.start + candidate.size;
            if (candidate.start <= column && column < site_end) {
                place = &candidate;
                site_record = record(segment, site);
                until = until < site_end ? until : site_end;
            } else if (candidate.start > column) {
                until = until < candidate.start ? until : candidate.start;
            }
        }
        for (int64_t member = begin; member < end; ++member) finish_columns(site_record, place, row(member), column, until);
        column = until;
    }
}

void Adapters::finish_columns(const SiteRecord& record, const Site* site, int64_t row, int64_t column, int64_t last) const {
    const float* from = arguments_.product + row * arguments_.out_features;
    const uint8_t* scale = nullptr;
    const uint8_t* bias = nullptr;
    int64_t start = 0;
    if (site != nullptr) {
        start = site->start;
        if (record.scale_row >= 0) scale = row_at(arguments_.memory, record.scale_row, kFp32, site->size, step_);
        if (record.bias_row >= 0) bias = row_at(arguments_.memory, record.bias_row, kFp32, site->size, step_);
    }
    using Reader = RowReader<kFp32>;
    for (; column + kLanes <= last; column += kLanes) {
        Vec value = load(from + column);
        if (scale != nullptr) value = value * Reader::vector(scale, column - start);
        store_out(arguments_, row, column, value + (bias != nullptr ? Reader::vector(bias, column - start) : load_bias(arguments_, column)));
    }
    for (; column < last; ++column) {
        float value = from[column];
        if (scale != nullptr) value *= Reader::element(scale, column - start);
        write_out(arguments_, row, column, value + (bias != nullptr ? Reader::element(bias, column - start) : bias_at(arguments_, column)));
    }
}

// x in fp32, with zeros up to whole pairs, a row a task.
void widen_rows(const LinearArguments& arguments, int64_t num_rows, Team& team) {
    team.share(num_rows, [&](int64_t row) {
        const bf16* from = static_cast<const bf16*>(arguments.x) + row * arguments.x_stride;
        float* to = arguments.wide + row * arguments.wide_stride;
        int64_t k = 0;
        for (; k + kLanes <= arguments.in; k += kLanes) store(to + k, load(from + k));
        for (; k < arguments.in; ++k) to[k] = widen(from[k]);
        for (; k < arguments.wide_stride; ++k) to[k] = 0.0f;
    });
}

#if GRAFTWORK_PAIRS
// x with a zero behind it: the machine takes whole pairs.
void pad_rows(const LinearArguments& arguments, int64_t num_rows, Team& team) {
    team.share(num_rows, [&](int64_t row) {
        bf16* to = arguments.pairs + row * (arguments.in + 1);
        std::memcpy(to, static_cast<const bf16*>(arguments.x) + row * arguments.x_stride, arguments.in * sizeof(bf16));
        to[arguments.in] = 0;
    });
}
#endif

template <class W, class X>
void run_product(const LinearArguments& arguments, Rows<X> x, Adapters& adapters, int64_t num_rows, Team& team) {
    const Panels<W> weight{static_cast<const W*>(arguments.weight), arguments.in, arguments.out_features};
    const int64_t per_task = panels_per_task(weight.count(), weight.stride() * int64_t{sizeof(W)}, team.size);
    const int64_t num_shrink_tasks = adapters.num_shrink_tasks(0);
    adapters.begin_round(0);
    team.share(num_shrink_tasks + divide_up(weight.count(), per_task), [&](int64_t task) {
        if (task < num_shrink_tasks) return adapters.shrink(task);
        const int64_t first = (task - num_shrink_tasks) * per_task;
        const int64_t last = first + per_task < weight.count() ? first + per_task : weight.count();
        multiply(weight, x, num_rows, first, last, [&](int64_t row, int64_t column, const Vec* panel) {
            if (adapters.has_row(row))
                keep_product(arguments, row, column, panel);
            else
                finish_base(arguments, row, column, panel);
        });
    });
}

void run_bf16(const LinearArguments& arguments, Adapters& adapters, int64_t num_rows, Team& team) {
#if GRAFTWORK_PAIRS
    if (adapters.num_segments() > 0) widen_rows(arguments, num_rows, team);
    Rows<bf16> x{static_cast<const bf16*>(arguments.x), arguments.x_stride};
    if (arguments.pairs != nullptr) {
        pad_rows(arguments, num_rows, team);
        x = Rows<bf16>{arguments.pairs, arguments.in + 1};
    }
#else
    widen_rows(arguments, num_rows, team);
    const Rows<float> x{arguments.wide, arguments.wide_stride};
#endif
    run_product<bf16>(arguments, x, adapters, num_rows, team);
}

void run(const LinearArguments& arguments, Step& step, Team& team) {
    const int64_t num_rows = step.num_rows;
    Adapters adapters(arguments, step);
    if (arguments.weight_type == kFloat32)
        run_product<float>(arguments, Rows<float>{arguments.wide, arguments.wide_stride}, adapters, num_rows, team);
    else
        run_bf16(arguments, adapters, num_rows, team);
    if (adapters.num_segments() == 0) return;
    for (int64_t round = 0; round < adapters.num_rounds(); ++round) {
        adapters.begin_round(round);
        if (round > 0) team.share(adapters.num_shrink_tasks(round), [&](int64_t task) { adapters.shrink(task); });
        adapters.begin_round(round);
        team.share(adapters.num_expand_tasks(), [&](int64_t task) { adapters.expand(task); });
    }
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_linear, LinearArguments)
