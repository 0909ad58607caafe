// A linear with each row's own adapter added: y = c ⊙ (x Wᵀ + h Bᵀ) + bias, h = x Aᵀ.
//
//     h of all rows, and x in the order of the adapters ─▶ tiles of x Wᵀ, and before one is put away: + h Bᵀ, c, bias, cast
//
// h Bᵀ is computed with h, where adapters have few rows each, or else tile by tile: what a tile will read of B is then fetched while
// the base's product is computed. x Wᵀ may be given, by a library that computes it faster.

#include <algorithm>

#include "adapter_rows.h"
#include "product.h"

using namespace graftwork;

namespace {

enum FloatType : int64_t { kFloat32 = 0, kBfloat16 = 1 };

struct LinearArguments {
    const void* x;
    int64_t x_stride;
    const void* weight;   // null where its product with x is given
    int64_t weight_type;  // also of x, and of a product that is given
    int64_t in, out_features;
    const void* product;  // or null: x Wᵀ [rows, out], rows in the step's own order
    const void* bias;  // or null
    int64_t bias_type;
    void* out;
    int64_t out_type;
    float* wide;   // scratch [rows, padded_in]: x in fp32 and in the order of the adapters; null where x is both
    bf16* pairs;   // scratch [rows, padded_in]: bf16 x in that order and padded; null where it is both
    float* tiles;  // scratch [threads, kTileRows, padded_in]: rows of x as dot_tile reads them; null without adapters
    int64_t padded_in;  // whole pairs, zero beyond `in`
    float* delta;  // scratch [rows, out in whole panels], rows in the adapters' order; null without adapters
    AdapterSites adapters;
};

constexpr int64_t kBlockRows = 48;
constexpr int64_t kBlockColumns = kMostPanels * kPanel;

// A block of a product: some rows, in the order of the adapters, times the panels of a task. It stays near while it is completed. The
// delta, with its columns in order, is written where it is added up here.
struct alignas(64) Block {
    float sums[kBlockRows][kBlockColumns];
    float delta[kBlockRows][kBlockColumns];
};

// What ends some columns: y = scale ⊙ sums + bias. Either may be null.
struct Ending {
    const float* scale;
    const float* bias;

    template <class T>
    T end(T value, int64_t i) const {
        if (scale != nullptr && bias != nullptr) return fma(value, at<T>(scale + i), at<T>(bias + i));
        if (scale != nullptr) return value * at<T>(scale + i);
        return bias != nullptr ? value + at<T>(bias + i) : value;
    }

private:
    template <class T>
    static T at(const float* from) {
        return load_as<T>(from);
    }
};

// `count` columns of one row: out of their panels, with their delta unless that is null, ended and cast.
template <class Out>
void write_row(Out* to, const float* sums, const float* delta, int64_t count, const Ending& ending) {
    int64_t i = 0;
    for (; i + kPanel <= count; i += kPanel) {
        Vec first, second;
        join({load(sums + i), load(sums + i + kLanes)}, first, second);
        if (delta != nullptr) first += load(delta + i), second += load(delta + i + kLanes);
        store(to + i, ending.end(first, i));
        store(to + i + kLanes, ending.end(second, i + kLanes));
    }
    for (int64_t rest = 0; i + rest < count; ++rest) {
        const float sum = sums[i + place_in_panel(rest)] + (delta != nullptr ? delta[i + rest] : 0.0f);
        write(to + i + rest, ending.end(sum, i + rest));
    }
}

// The whole blocks of `count` elements, in fp32 and split, the even before the odd; how many elements these are.
template <class From>
int64_t split_blocks(const From* from, int64_t count, float* to) {
    int64_t k = 0;
    for (; k + 2 * kLanes <= count; k += 2 * kLanes) {
        Split two;
        if constexpr (sizeof(From) == 2)
            two = split(from + k);
        else
            two = split(load(from + k), load(from + k + kLanes));
        store(to + k, two.even);
        store(to + k + kLanes, two.odd);
    }
    return k;
}

// `count` elements of one row of a product, in fp32 and in the order of panels, which are split too; zero to the panels' end.
template <class From>
void widen_panels(const From* from, int64_t count, int64_t num_panels, float* sums) {
    const int64_t i = split_blocks(from, count, sums);
    for (int64_t rest = 0; i + rest < num_panels * kPanel; ++rest)
        sums[i + place_in_panel(rest)] = i + rest < count ? read(from + i + rest) : 0.0f;
}

// One task of a product: its panels, and what becomes of them. Told by `multiply` which rows come, and given their sums.
class Columns {
public:
    Columns(const LinearArguments& arguments, const Adapters& adapters, int64_t first_panel, int64_t last_panel)
        : arguments_(arguments), adapters_(adapters), column_(first_panel * kPanel), num_panels_(last_panel - first_panel) {
        const int64_t left = arguments.out_features - column_;
        count_ = num_panels_ * kPanel < left ? num_panels_ * kPanel : left;
        for (int64_t i = 0; arguments.bias != nullptr && i < count_; ++i) base_bias_[i] = bias_at(column_ + i);
        base_ = {nullptr, arguments.bias != nullptr ? base_bias_ : nullptr};
    }

    // Rows first .. last of the order, whose sums come next.
    void begin(int64_t first, int64_t last) { first_ = first, last_ = last; }

    void expect(int64_t row, int64_t count) const {
        adapters_.for_runs(first_ + row, count, [&](int64_t adapter, int64_t place, int64_t) {
            const bool is_fetched = place > first_ && adapters_.adapter_at(place - 1) == adapter;
            if (adapter >= 0 && !is_fetched) adapters_.prefetch(adapter, column_, count_);
        });
    }

    void take(int64_t row, int64_t count, int64_t panel, int64_t num_panels, const Vec* sums) {
        for (int64_t i = 0; i < count; ++i)
            for (int64_t vector = 0; vector < 2 * num_panels; ++vector)
                store(block_.sums[row + i] + panel * kPanel + vector * kLanes, sums[i * 2 * num_panels + vector]);
    }

    // The sums of a product that is given, in place of one that is computed: put into panels.
    template <class From>
    void take_given() {
        expect(0, last_ - first_);
        for (int64_t i = first_; i < last_; ++i) {
            const int64_t from = adapters_.row_at_place(i) * arguments_.out_features + column_;
            widen_panels(static_cast<const From*>(arguments_.product) + from, count_, num_panels_, block_.sums[i - first_]);
        }
    }

    void write() {
        adapters_.for_runs(first_, last_ - first_, [&](int64_t adapter, int64_t place, int64_t length) {
            const Ending ending = ending_of(adapter);
            const Delta delta = delta_of(adapter, place, length);
            for (int64_t i = 0; i < length; ++i) {
                const int64_t to = adapters_.row_at_place(place + i) * arguments_.out_features + column_;
                const float* sums = block_.sums[place + i - first_];
                const float* own = delta.rows == nullptr ? nullptr : delta.at(i, 0);
                if (arguments_.out_type == kFloat32)
                    write_row(static_cast<float*>(arguments_.out) + to, sums, own, count_, ending);
                else
                    write_row(static_cast<bf16*>(arguments_.out) + to, sums, own, count_, ending);
            }
        });
    }

private:
    // What an adapter adds to these columns of a run, or null.
    Delta delta_of(int64_t adapter, int64_t place, int64_t length) {
        if (!adapters_.has_delta(adapter)) return {};
        if (!adapters_.adds_later()) return {adapters_.delta().at(place, column_), adapters_.delta().stride};
        const Delta own{block_.delta[place - first_], kBlockColumns};
        for (int64_t i = 0; i < length; ++i) std::memset(own.at(i, 0), 0, count_ * sizeof(float));
        adapters_.add(adapter, place, length, column_, count_, own);
        return own;
    }

    float bias_at(int64_t column) const {
        if (arguments_.bias_type == kFloat32) return static_cast<const float*>(arguments_.bias)[column];
        return widen(static_cast<const bf16*>(arguments_.bias)[column]);
    }
    Ending ending_of(int64_t adapter);
    static const float* at(const uint8_t* row, int64_t column) {
        return row == nullptr ? nullptr : reinterpret_cast<const float*>(row) + column;
    }

    const LinearArguments& arguments_;
    const Adapters& adapters_;
    const int64_t column_, num_panels_;
    int64_t count_;
    int64_t first_ = 0, last_ = 0;
    Ending base_;
    float base_bias_[kBlockColumns], own_scale_[kBlockColumns], own_bias_[kBlockColumns];  // written where there are any
    Block block_;
};

// The base's, where an adapter brings neither scale nor bias for these columns. One projection's are read where they lie; those of
// several are put together.
Ending Columns::ending_of(int64_t adapter) {
    bool has_scale = false, has_bias = false;
    for (int64_t number = 0; adapter >= 0 && number < adapters_.num_sites(); ++number) {
        const Site& site = adapters_.site(number);
        const int64_t begin = site.start > column_ ? site.start - column_ : 0;
        const int64_t end = site.start + site.size - column_ < count_ ? site.start + site.size - column_ : count_;
        if (begin >= end) continue;
        const SiteRecord record = adapters_.record(adapter, number);
        const uint8_t* scale = adapters_.values(record.scale_row, number);
        const uint8_t* bias = adapters_.values(record.bias_row, number);
        const int64_t offset = column_ - site.start;
        if (end - begin == count_) return {at(scale, offset), bias != nullptr ? at(bias, offset) : base_.bias};
        if (scale != nullptr && !has_scale) std::fill_n(own_scale_, count_, 1.0f);
        if (scale != nullptr) std::memcpy(own_scale_ + begin, at(scale, offset + begin), (end - begin) * sizeof(float));
        if (bias != nullptr && !has_bias)
            for (int64_t i = 0; i < count_; ++i) own_bias_[i] = base_.bias != nullptr ? base_.bias[i] : 0.0f;
        if (bias != nullptr) std::memcpy(own_bias_ + begin, at(bias, offset + begin), (end - begin) * sizeof(float));
        has_scale |= scale != nullptr;
        has_bias |= bias != nullptr;
    }
    return {has_scale ? own_scale_ : nullptr, has_bias ? own_bias_ : base_.bias};
}

// x in the order of the adapters and as the product reads it.
template <class To, class From>
struct Gather {
    const LinearArguments& arguments;
    const Adapters& adapters;
    To* rows;

    void operator()(int64_t place) const {
        const From* from = static_cast<const From*>(arguments.x) + adapters.row_at_place(place) * arguments.x_stride;
        To* to = rows + place * arguments.padded_in;
        int64_t k = 0;
        for (; k + kLanes <= arguments.in; k += kLanes) store(to + k, load(from + k));
        for (; k < arguments.in; ++k) write(to + k, read(from + k));
        for (; k < arguments.padded_in; ++k) write(to + k, 0.0f);
    }
};

// One row of x in fp32.
template <class From>
void widen_row(const From* from, int64_t in, float* to) {
    int64_t k = 0;
    for (; k + kLanes <= in; k += kLanes) store(to + k, load(from + k));
    for (; k < in; ++k) to[k] = read(from + k);
}

// What is computed of the adapters beforehand, and the copies of x that the product reads: neither waits for the other.
template <class W, class Copy>
void prepare(const LinearArguments& arguments, Adapters& adapters, int64_t num_rows, int64_t num_copies, Copy&& copy, Team& team) {
    if (!adapters.any()) {
        if (num_copies > 0) team.share(num_copies, copy);
        return;
    }
    adapters.begin(team.size, {arguments.delta, round_up(arguments.out_features, kPanel)}, arguments.out_features);
    float* tile = arguments.tiles + team.rank * kTileRows * arguments.padded_in;
    for (int64_t round = 0; round < adapters.num_rounds(); ++round) {
        const int64_t num_shrinks = adapters.begin_round(round);
        team.share(num_copies + num_shrinks, [&](int64_t task) {
            if (task < num_copies) return copy(task);
            adapters.shrink(task - num_copies, task - num_copies + team.size, tile, arguments.padded_in, [&](int64_t row, float* to) {
                widen_row(static_cast<const W*>(arguments.x) + row * arguments.x_stride, arguments.in, to);
            });
        });
        num_copies = 0;
        if (!adapters.adds_in_rounds()) continue;
        team.share(divide_up(arguments.out_features, kBlockColumns), [&](int64_t task) {
            const int64_t column = task * kBlockColumns, left = arguments.out_features - column;
            adapters.add_round(num_rows, column, left < kBlockColumns ? left : kBlockColumns);
        });
    }
}

template <class W, class X, class Copy>
void run_with(const LinearArguments& arguments, Rows<X> x, int64_t num_copies, Copy&& copy, Adapters& adapters, int64_t num_rows,
              Team& team) {
    const Panels<W> weight{static_cast<const W*>(arguments.weight), arguments.in, arguments.out_features};
    const int64_t per_task = panels_per_task(weight.count(), weight.stride() * int64_t{sizeof(W)}, team.size);
    const int64_t num_blocks = divide_up(num_rows, kBlockRows);
    prepare<W>(arguments, adapters, num_rows, num_copies, copy, team);
    team.share(divide_up(weight.count(), per_task), [&](int64_t task) {
        const int64_t first = task * per_task;
        const int64_t last = first + per_task < weight.count() ? first + per_task : weight.count();
        Columns columns(arguments, adapters, first, last);
        for (int64_t block = 0; block < num_blocks; ++block) {
            const int64_t begin = block * num_rows / num_blocks, end = (block + 1) * num_rows / num_blocks;
            columns.begin(begin, end);
            if (arguments.product != nullptr)
                columns.template take_given<W>();
            else
                multiply(weight, Rows<X>{x.at(begin), x.stride}, end - begin, first, last, columns);
            columns.write();
        }
    });
}

// With the rows of x as they lie if the product can read them so or is given, else with copies: in the adapters' order, of type X,
// padded.
template <class W, class X>
void run_on(const LinearArguments& arguments, X* copies, Adapters& adapters, int64_t num_rows, Team& team) {
    const Gather<X, W> copy{arguments, adapters, copies};
    if (arguments.product != nullptr)
        return run_with<W>(arguments, Rows<X>{}, 0, copy, adapters, num_rows, team);
    if constexpr (std::is_same_v<W, X>)
        if (!adapters.any() && Panels<W>::padded(arguments.in) == arguments.in)
            return run_with<W>(arguments, Rows<X>{static_cast<const X*>(arguments.x), arguments.x_stride}, 0, copy, adapters,
                                 num_rows, team);
    run_with<W>(arguments, Rows<X>{copies, arguments.padded_in}, num_rows, copy, adapters, num_rows, team);
}

void run(const LinearArguments& arguments, Step& step, Team& team) {
    Adapters adapters(arguments.adapters, arguments.in, step);
    if (arguments.weight_type == kFloat32)
        run_on<float>(arguments, arguments.wide, adapters, step.num_rows, team);
    else
#if GRAFTWORK_PAIRS
        run_on<bf16>(arguments, arguments.pairs, adapters, step.num_rows, team);
#else
        run_on<bf16>(arguments, arguments.wide, adapters, step.num_rows, team);
#endif
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_linear, LinearArguments)
