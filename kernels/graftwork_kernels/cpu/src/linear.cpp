// A linear with each row's own adapter added: y = c ⊙ (x Wᵀ + h Bᵀ) + bias, h = x Aᵀ.
//
//     h of all rows, and x in the order of the adapters ─▶ tiles of x Wᵀ, and before one is put away: + h Bᵀ, c, bias, cast
//
// What a tile will read of B is fetched while the base's product is computed, which leaves memory idle. Ranks beyond a chunk take
// more rounds of h and h Bᵀ, between which the sums are kept. x Wᵀ may be given, by a library that computes it faster.

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
    float* sums;  // scratch [rows, out in whole panels]: between rounds; null without adapters
    AdapterSites adapters;
};

constexpr int64_t kBlockRows = 48;
constexpr int64_t kBlockColumns = kMostPanels * kPanel;

// A block of a product: some rows, in the order of the adapters, times the panels of a task. It stays near while it is completed.
struct alignas(64) Block {
    float sums[kBlockRows][kBlockColumns];
};

// What ends some columns: y = scale ⊙ sums + bias.
struct Ending {
    float scale[kBlockColumns], bias[kBlockColumns];  // written where there are any
    bool has_scale, has_bias;

    Vec end(Vec value, int64_t i) const {
        if (has_scale) return fma(value, load(scale + i), load(bias + i));
        return has_bias ? value + load(bias + i) : value;
    }
    float end(float value, int64_t i) const {
        if (has_scale) return fma(value, scale[i], bias[i]);
        return has_bias ? value + bias[i] : value;
    }
};

// `count` columns of one row: out of their panels, ended and cast.
template <class Out>
void write_row(Out* to, const float* sums, int64_t count, const Ending& ending) {
    int64_t i = 0;
    for (; i + kPanel <= count; i += kPanel) {
        Vec first, second;
        join({load(sums + i), load(sums + i + kLanes)}, first, second);
        store(to + i, ending.end(first, i));
        store(to + i + kLanes, ending.end(second, i + kLanes));
    }
    for (int64_t rest = 0; i + rest < count; ++rest) write(to + i + rest, ending.end(sums[i + place_in_panel(rest)], i + rest));
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
        base_.has_scale = false;
        base_.has_bias = arguments.bias != nullptr;
        for (int64_t i = 0; base_.has_bias && i < count_; ++i) base_.bias[i] = bias_at(column_ + i);
    }

    // Rows first .. last of the order, whose sums come next.
    void begin(int64_t first, int64_t last) { first_ = first, last_ = last; }

    void expect(int64_t row, int64_t count) const {
        for_runs(first_ + row, count, [&](int64_t adapter, int64_t place, int64_t) {
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
        for (int64_t i = first_; i < last_; ++i) {
            const int64_t from = adapters_.row_at_place(i) * arguments_.out_features + column_;
            widen_panels(static_cast<const From*>(arguments_.product) + from, count_, num_panels_, block_.sums[i - first_]);
        }
    }

    // The sums of an earlier round, in place of a product's; and those of this round, kept for the next.
    void take_kept() {
        for (int64_t i = first_; i < last_; ++i) std::memcpy(block_.sums[i - first_], kept(i), kept_bytes());
    }
    void add_and_keep() {
        add();
        for (int64_t i = first_; i < last_; ++i) std::memcpy(kept(i), block_.sums[i - first_], kept_bytes());
    }

    void add_and_write() {
        add();
        for_runs(first_, last_ - first_, [&](int64_t adapter, int64_t place, int64_t length) {
            const Ending& ending = ending_of(adapter);
            for (int64_t i = place; i < place + length; ++i) {
                const int64_t to = adapters_.row_at_place(i) * arguments_.out_features + column_;
                if (arguments_.out_type == kFloat32)
                    write_row(static_cast<float*>(arguments_.out) + to, block_.sums[i - first_], count_, ending);
                else
                    write_row(static_cast<bf16*>(arguments_.out) + to, block_.sums[i - first_], count_, ending);
            }
        });
    }

private:
    void add() {
        for_runs(first_, last_ - first_, [&](int64_t adapter, int64_t place, int64_t length) {
            const Sums sums{block_.sums[place - first_], kBlockColumns};
            if (adapter >= 0) adapters_.add(adapter, place, length, column_, count_, sums);
        });
    }

    template <class Body>
    void for_runs(int64_t place, int64_t count, Body&& body) const {
        for (const int64_t end = place + count; place < end;) {
            const int64_t length = adapters_.run_length(place, end - place);
            body(adapters_.adapter_at(place), place, length);
            place += length;
        }
    }

    size_t kept_bytes() const { return num_panels_ * kPanel * sizeof(float); }
    float* kept(int64_t place) const { return arguments_.sums + place * round_up(arguments_.out_features, kPanel) + column_; }
    float bias_at(int64_t column) const {
        if (arguments_.bias_type == kFloat32) return static_cast<const float*>(arguments_.bias)[column];
        return widen(static_cast<const bf16*>(arguments_.bias)[column]);
    }
    const Ending& ending_of(int64_t adapter);

    const LinearArguments& arguments_;
    const Adapters& adapters_;
    const int64_t column_, num_panels_;
    int64_t count_;
    int64_t first_ = 0, last_ = 0;
    Ending base_, own_;
    Block block_;
};

// The base's, where an adapter brings neither scale nor bias for these columns.
const Ending& Columns::ending_of(int64_t adapter) {
    bool found = false;
    for (int64_t number = 0; adapter >= 0 && number < adapters_.num_sites(); ++number) {
        const Site& site = adapters_.site(number);
        const int64_t begin = site.start > column_ ? site.start - column_ : 0;
        const int64_t end = site.start + site.size - column_ < count_ ? site.start + site.size - column_ : count_;
        if (begin >= end) continue;
        const SiteRecord record = adapters_.record(adapter, number);
        const uint8_t* scale = adapters_.values(record.scale_row, number);
        const uint8_t* bias = adapters_.values(record.bias_row, number);
        if (scale == nullptr && bias == nullptr) continue;
        if (!found) {
            for (int64_t i = 0; i < count_; ++i) own_.scale[i] = 1.0f, own_.bias[i] = base_.has_bias ? base_.bias[i] : 0.0f;
            own_.has_scale = own_.has_bias = found = true;
        }
        const int64_t offset = column_ - site.start;
        for (int64_t i = begin; i < end && scale != nullptr; ++i) own_.scale[i] = RowReader<kFp32>::element(scale, offset + i);
        for (int64_t i = begin; i < end && bias != nullptr; ++i) own_.bias[i] = RowReader<kFp32>::element(bias, offset + i);
    }
    return found ? own_ : base_;
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

// One row of x as dot_tile reads it: in fp32, split block by block.
template <class From>
void widen_split(const From* from, int64_t in, float* to) {
    for (int64_t k = split_blocks(from, in, to); k < in; ++k) to[k] = read(from + k);
}

// h of all rows in this round, and before the first the copies of x that the product reads: neither waits for the other.
template <class W, class Copy>
void prepare(const LinearArguments& arguments, Adapters& adapters, int64_t round, int64_t num_copies, Copy&& copy, Team& team) {
    const int64_t num_shrinks = adapters.any() ? adapters.begin_round(round, team.size) : 0;
    float* tile = arguments.tiles + team.rank * kTileRows * arguments.padded_in;
    team.share(num_copies + num_shrinks, [&](int64_t task) {
        if (task < num_copies) return copy(task);
        adapters.shrink(task - num_copies, task - num_copies + team.size, tile, arguments.padded_in, [&](int64_t row, float* to) {
            widen_split(static_cast<const W*>(arguments.x) + row * arguments.x_stride, arguments.in, to);
        });
    });
    adapters.end_shrink();
}

template <class W, class X, class Copy>
void run_rounds(const LinearArguments& arguments, Rows<X> x, int64_t num_copies, Copy&& copy, Adapters& adapters, int64_t num_rows,
                Team& team) {
    const Panels<W> weight{static_cast<const W*>(arguments.weight), arguments.in, arguments.out_features};
    const int64_t per_task = panels_per_task(weight.count(), weight.stride() * int64_t{sizeof(W)}, team.size);
    const int64_t num_rounds = adapters.num_rounds(), num_blocks = divide_up(num_rows, kBlockRows);
    for (int64_t round = 0; round < num_rounds; ++round) {
        if (adapters.any() || num_copies > 0) prepare<W>(arguments, adapters, round, round == 0 ? num_copies : 0, copy, team);
        team.share(divide_up(weight.count(), per_task), [&](int64_t task) {
            const int64_t first = task * per_task;
            const int64_t last = first + per_task < weight.count() ? first + per_task : weight.count();
            Columns columns(arguments, adapters, first, last);
            for (int64_t block = 0; block < num_blocks; ++block) {
                const int64_t begin = block * num_rows / num_blocks, end = (block + 1) * num_rows / num_blocks;
                columns.begin(begin, end);
                if (round == 0 && arguments.product != nullptr)
                    columns.template take_given<W>();
                else if (round == 0)
                    multiply(weight, Rows<X>{x.at(begin), x.stride}, end - begin, first, last, columns);
                else
                    columns.take_kept();
                if (round + 1 < num_rounds)
                    columns.add_and_keep();
                else
                    columns.add_and_write();
            }
        });
    }
}

// With the rows of x as they lie if the product can read them so or is given, else with copies: in the adapters' order, of type X,
// padded.
template <class W, class X>
void run_on(const LinearArguments& arguments, X* copies, Adapters& adapters, int64_t num_rows, Team& team) {
    const Gather<X, W> copy{arguments, adapters, copies};
    if (arguments.product != nullptr)
        return run_rounds<W>(arguments, Rows<X>{}, 0, copy, adapters, num_rows, team);
    if constexpr (std::is_same_v<W, X>)
        if (!adapters.any() && Panels<W>::padded(arguments.in) == arguments.in)
            return run_rounds<W>(arguments, Rows<X>{static_cast<const X*>(arguments.x), arguments.x_stride}, 0, copy, adapters,
                                 num_rows, team);
    run_rounds<W>(arguments, Rows<X>{copies, arguments.padded_in}, num_rows, copy, adapters, num_rows, team);
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
