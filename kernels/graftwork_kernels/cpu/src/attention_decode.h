// Attention of a single query row. Its context is cut in chunks of a fixed length, each with softmax sums of its own, which are
// then folded together in order; so it does not matter to the result which threads took them, or whether one took them all.
//
// The query heads that share a key head are computed together: a key is read and widened once for all of them.

#pragma once

#include "attention.h"

// A call would spill what is being summed, and goes through a table in a shared library.
#define GRAFTWORK_INLINE inline __attribute__((always_inline))

namespace graftwork {

constexpr int kHeadsAtOnce = kLanes == 16 ? 4 : 3;  // four keys' sums for each of them fit in registers
constexpr int64_t kPair = 2 * kLanes;
constexpr int64_t kAhead = 16;  // keys between the one that is computed and the one that is fetched
constexpr int64_t kBeyond = kAhead + 3;  // places after a chunk that are looked at when its last four keys are scored

// kPair elements of a row, in the order that takes least work: of bf16 the even ones, then the odd.
struct Pair {
    Vec first, second;
};

inline Pair load_pair(const float* from) { return {load(from), load(from + kLanes)}; }

inline Pair load_pair(const bf16* from) {
    const Bits words = load_as<Bits>(from);
    return {reinterpret_cast<Vec>(words << 16), reinterpret_cast<Vec>(words & 0xffff0000u)};
}

// The nearest bf16 in the upper half of each lane, halves to even; NaN stays NaN.
inline Bits rounded_to_bf16(Vec value) {
    const Bits bits = reinterpret_cast<Bits>(value);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) | reinterpret_cast<Bits>(value != value);
}

inline void store_pair(float* to, Pair pair) {
    store(to, pair.first);
    store(to + kLanes, pair.second);
}

inline void store_pair(bf16* to, Pair pair) {
    const Bits words = (rounded_to_bf16(pair.first) >> 16) | (rounded_to_bf16(pair.second) & 0xffff0000u);
    std::memcpy(to, &words, sizeof(words));
}

template <class T>
constexpr int64_t kLine = 64 / sizeof(T);  // elements that memory hands over at a time

// Where element `index` of a row lies once its pairs have been loaded.
template <class T>
inline int64_t paired(int64_t index) {
    if constexpr (sizeof(T) == 4) return index;
    const int64_t within = index % kPair;
    return index - within + within % 2 * kLanes + within / 2;
}

// Softmax sums over a piece of context for the heads that share a key head. `values` are weighted by exp(score - max).
struct Partial {
    float* max;     // [group]
    float* sum;     // [group]
    float* values;  // [group, width], in pairs

    Partial(float* memory, int64_t group) : max(memory), sum(memory + group), values(memory + 2 * group) {}

    static int64_t size(int64_t group, int64_t width) { return group * (2 + width); }
};

template <int... kLane>
using Lanes = std::integer_sequence<int, kLane...>;

template <class Index, int... kLane>
inline Vec pick(Vec a, Vec b, Lanes<kLane...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Index::of(kLane)...);
#else
    return __builtin_shuffle(a, b, Ints{Index::of(kLane)...});
#endif
}

// Within each four lanes: elements kFrom and kFrom + 1 of a and of b in turn.
template <int kFrom>
struct Interleaved {
    static constexpr int of(int lane) { return lane / 4 * 4 + kFrom + lane % 4 / 2 + (lane % 2 ? kLanes : 0); }
};

inline Vec fold_halves(Vec a, Vec b) {
    using All = std::make_integer_sequence<int, kLanes>;
    return pick<Interleaved<0>>(a, b, All{}) + pick<Interleaved<2>>(a, b, All{});
}

// The sums over the lanes of four vectors.
inline void store_sums(float* to, Vec a, Vec b, Vec c, Vec d) {
    using Four = float __attribute__((vector_size(16)));
    float lanes[kLanes];
    store(lanes, fold_halves(fold_halves(a, c), fold_halves(b, d)));
    Four total = load_as<Four>(lanes);
    for (int lane = 4; lane < kLanes; lane += 4) total += load_as<Four>(lanes + lane);
    std::memcpy(to, &total, sizeof(total));
}

// The same value, loaded once: what is used twice the compiler would fetch twice, and loads are what the machine has least of.
inline Vec held(Vec value) {
#if (defined(__AVX512F__) && GRAFTWORK_LANES == 16) || (defined(__AVX2__) && GRAFTWORK_LANES == 8)
    __asm__("" : "+v"(value));
#endif
    return value;
}

// sums[key][head] += query[head] * keys[key], lane by lane.
template <int kHeads, class T>
GRAFTWORK_INLINE void multiply_two(const float* query, int64_t width, const T* first, const T* second, Vec (&sums)[2][kHeads]) {
    for (int64_t i = 0; i < width; i += kPair) {
        const Pair pairs[2] = {load_pair(first + i), load_pair(second + i)};
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            const Vec q = held(load(query + head * width + i));
#pragma GCC unroll 2
            for (int key = 0; key < 2; ++key) sums[key][head] = fma(pairs[key].first, q, sums[key][head]);
        }
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            const Vec q = held(load(query + head * width + i + kLanes));
#pragma GCC unroll 2
            for (int key = 0; key < 2; ++key) sums[key][head] = fma(pairs[key].second, q, sums[key][head]);
        }
    }
}

// scores[head][0 .. 4] = query[head] · keys[0 .. 4].
template <int kHeads, class T>
GRAFTWORK_INLINE void score_four(const float* query, int64_t width, const T* keys, const int64_t* offsets, float* scores) {
    Vec low[2][kHeads] = {}, high[2][kHeads] = {};
    multiply_two<kHeads>(query, width, keys + offsets[0], keys + offsets[1], low);
    multiply_two<kHeads>(query, width, keys + offsets[2], keys + offsets[3], high);
#pragma GCC unroll 4
    for (int head = 0; head < kHeads; ++head)
        store_sums(scores + head * kChunk, low[0][head], low[1][head], high[0][head], high[1][head]);
}

// sums[head] = sum over the keys of weights[head][key] * values[key], for a pair of columns. With kFetches, the rows' next line
// comes meanwhile.
template <int kHeads, bool kFetches, class T>
inline void weigh(const float* weights, const T* values, const int64_t* offsets, int64_t count, float* sums, int64_t width) {
    Vec first[kHeads] = {}, second[kHeads] = {};
    for (int64_t key = 0; key < count; ++key) {
        const Pair pair = load_pair(values + offsets[key]);
        if constexpr (kFetches) __builtin_prefetch(values + offsets[key] + kLine<T>);
#pragma GCC unroll 4
        for (int head = 0; head < kHeads; ++head) {
            const Vec weight = splat(weights[head * kChunk + key]);
            first[head] = fma(weight, pair.first, first[head]);
            second[head] = fma(weight, pair.second, second[head]);
        }
    }
#pragma GCC unroll 4
    for (int head = 0; head < kHeads; ++head) {
        store(sums + head * width, first[head]);
        store(sums + head * width + kLanes, second[head]);
    }
}

// Scores become weights; there is room for whole units, whose rest is scratch.
inline void soften(float* scores, int64_t count, float* max, float* sum) {
    const int64_t padded = round_up(count, kWeightUnit);
    std::fill(scores + count, scores + padded, -std::numeric_limits<float>::infinity());
    *max = largest_of(scores, padded);
    *sum = weights_of(scores, padded, *max);
}

// Call body(heads, first) for parts of a group that are about equal and at most kHeadsAtOnce: `heads` is known to the compiler.
template <class Body>
inline void by_heads(int64_t group, Body&& body) {
    for (int64_t head = 0, parts = divide_up(group, kHeadsAtOnce); head < group; --parts) {
        const int64_t heads = divide_up(group - head, parts);
        if (heads == 1) body(std::integral_constant<int, 1>{}, head);
        if (heads == 2) body(std::integral_constant<int, 2>{}, head);
        if (heads == 3) body(std::integral_constant<int, 3>{}, head);
        if constexpr (kHeadsAtOnce == 4)
            if (heads == 4) body(std::integral_constant<int, 4>{}, head);
        head += heads;
    }
}

// One decode row before one key head.
template <class T>
class DecodeTask {
public:
    DecodeTask(const AttentionArguments& arguments, Step& step, const Request& request, int64_t kv_head, float* memory)
        : a_(arguments), step_(step), request_(request), kv_head_(kv_head), group_(a_.group()), width_(width(a_)),
          is_padded_(width_ != a_.head_dim), work_(memory),
          query_(work_.take(group_ * width_)), scores_(work_.take(group_ * kChunk)), state_(work_.take(partial_size(a_))),
          piece_(work_.take(partial_size(a_))), padded_(reinterpret_cast<T*>(work_.take(is_padded_ * kChunk * width_))) {
        const T* heads = static_cast<const T*>(a_.q) + request_.first_row * a_.q_stride + kv_head_ * group_ * a_.head_dim;
        for (int64_t head = 0; head < group_; ++head) load_query(heads + head * a_.head_dim, query_ + head * width_);
    }

    // Floats that a task works in.
    static int64_t workspace(const AttentionArguments& a) {
        const int64_t padded = width(a) != a.head_dim ? kChunk * width(a) : 0;
        return a.group() * (width(a) + kChunk) + 2 * partial_size(a) + padded;
    }

    // Floats of one `Partial`.
    static int64_t partial_size(const AttentionArguments& a) { return Partial::size(a.group(), width(a)); }

    // One chunk, its partial left in `memory`.
    void attend_chunk(int64_t number, float* memory) {
        const Partial result(memory, group_);
        const int64_t first = number * kChunk, count = std::min(kChunk, request_.context - first);
        if (!locate(a_, step_, request_.number, first, count, offsets_)) {
            std::fill_n(memory, partial_size(a_), 0.0f);
            return;
        }
        std::fill_n(offsets_ + count, kBeyond, offsets_[count - 1]);
        score(count);
        for (int64_t head = 0; head < group_; ++head) soften(scores_ + head * kChunk, count, result.max + head, result.sum + head);
        weigh_values(count, result);
    }

    // All chunks, one after the other.
    void attend() {
        attend_chunk(0, state_);
        for (int64_t number = 1; number < request_.num_chunks(); ++number) {
            attend_chunk(number, piece_);
            fold(piece_);
        }
        finish();
    }

    // All chunks, from the partials of `attend_chunk`, `stride` floats apart.
    void gather(const float* partials, int64_t stride) {
        std::copy_n(partials, partial_size(a_), state_);
        for (int64_t number = 1; number < request_.num_chunks(); ++number) fold(partials + number * stride);
        finish();
    }

private:
    static int64_t width(const AttentionArguments& a) { return round_up(a.head_dim, kPair); }

    void load_query(const T* head, float* query) const {
        int64_t i = 0;
        for (; i + kPair <= a_.head_dim; i += kPair) {
            const Pair pair = load_pair(head + i);
            store(query + i, pair.first * a_.scale);
            store(query + i + kLanes, pair.second * a_.scale);
        }
        std::fill(query + i, query + width_, 0.0f);
        for (; i < a_.head_dim; ++i) query[paired<T>(i)] = read(head + i) * a_.scale;
    }

    void score(int64_t count) {
        const T* keys = rows_of(a_.k_cache, count);
        const T* values = static_cast<const T*>(a_.v_cache) + kv_head_ * a_.head_elements();
        by_heads(group_, [&](auto heads, int64_t head) {
            for (int64_t key = 0; key < count; key += 4) {
                if (head == 0)
                    for (int64_t next = key; next < key + 4; ++next) {
                        fetch_row(keys + rows_[next + kAhead]);
                        __builtin_prefetch(values + offsets_[next]);
                    }
                score_four<heads>(query_ + head * width_, width_, keys, rows_ + key, scores_ + head * kChunk + key);
            }
        });
    }

    // Blocks lie apart, so the machine does not see by itself what is read next. While keys are computed those ahead come, and of
    // each row of values the first line; the rest comes while the line before it is computed, so that memory is not idle for long.
    void fetch_row(const T* row) const {
        for (int64_t i = 0; i < a_.head_dim; i += kLine<T>) __builtin_prefetch(row + i);
    }

    void weigh_values(int64_t count, const Partial& result) {
        const T* values = rows_of(a_.v_cache, count);
        by_heads(group_, [&](auto heads, int64_t head) {
            const float* weights = scores_ + head * kChunk;
            float* sums = result.values + head * width_;
            for (int64_t i = 0; i < width_; i += kPair) {
                if (head == 0 && i % kLine<T> == 0 && i + kLine<T> < width_)
                    weigh<heads, true>(weights, values + i, rows_, count, sums + i, width_);
                else
                    weigh<heads, false>(weights, values + i, rows_, count, sums + i, width_);
            }
        });
    }

    // The rows of this chunk begin at the result + rows_[key]: in the cache itself, or copied where they do not fill whole pairs.
    const T* rows_of(const void* cache, int64_t count) {
        const T* head = static_cast<const T*>(cache) + kv_head_ * a_.head_elements();
        rows_ = offsets_;
        if (!is_padded_) return head;
        for (int64_t key = 0; key < count; ++key) {
            std::copy_n(head + offsets_[key], a_.head_dim, padded_ + key * width_);
            std::fill(padded_ + key * width_ + a_.head_dim, padded_ + (key + 1) * width_, T{});
        }
        for (int64_t key = 0; key < count + kBeyond; ++key) padded_rows_[key] = std::min(key, count - 1) * width_;
        rows_ = padded_rows_;
        return padded_;
    }

    // Add a later chunk to the state.
    void fold(const float* memory) {
        const Partial state(state_, group_), piece(const_cast<float*>(memory), group_);
        for (int64_t head = 0; head < group_; ++head) {
            const float top = std::max(state.max[head], piece.max[head]);
            const Vec before = exponential(splat(state.max[head] - top)), added = exponential(splat(piece.max[head] - top));
            state.max[head] = top;
            state.sum[head] = graftwork::fma(state.sum[head], before[0], piece.sum[head] * added[0]);
            float *sums = state.values + head * width_, *terms = piece.values + head * width_;
            for (int64_t i = 0; i < width_; i += kLanes)
                store(sums + i, graftwork::fma(load(sums + i), before, load(terms + i) * added));
        }
    }

    void finish() {
        const Partial state(state_, group_);
        T* out = static_cast<T*>(a_.out) + (request_.first_row * a_.num_heads + kv_head_ * group_) * a_.head_dim;
        for (int64_t head = 0; head < group_; ++head)
            store_head(state.values + head * width_, state.sum[head], out + head * a_.head_dim);
    }

    void store_head(const float* sums, float total, T* out) const {
        int64_t i = 0;
        for (; i + kPair <= a_.head_dim; i += kPair)
            store_pair(out + i, {load(sums + i) / total, load(sums + i + kLanes) / total});
        for (; i < a_.head_dim; ++i) write(out + i, sums[paired<T>(i)] / total);
    }

    const AttentionArguments& a_;
    Step& step_;
    const Request request_;
    const int64_t kv_head_, group_, width_;
    const bool is_padded_;
    Workspace work_;
    float *query_, *scores_, *state_, *piece_;  // [group, width], [group, kChunk], a `Partial` each
    T* padded_;                                 // [kChunk, width]
    const int64_t* rows_ = nullptr;
    int64_t offsets_[kChunk + kBeyond], padded_rows_[kChunk + kBeyond];
};

}  // namespace graftwork
