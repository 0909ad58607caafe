// Passes over a row of logits: where its largest lies, and what its tokens weigh. A row is cut into blocks, fixed by its length,
// whose results are the same bits whoever computes them.

#pragma once

#include <algorithm>

#include "groups.h"

namespace graftwork {

constexpr int64_t kBlock = 512;              // tokens whose weights are summed in fp32; blocks are added in fp64
constexpr int64_t kPiece = 16 * kBlock;      // tokens of one task, where a row is shared by several threads
constexpr float kInfinity = std::numeric_limits<float>::infinity();

inline int64_t num_blocks(int64_t num_tokens) { return (num_tokens + kBlock - 1) / kBlock; }
inline int64_t num_pieces(int64_t num_tokens) { return (num_tokens + kPiece - 1) / kPiece; }

// The largest of some logits, and where the first block that holds it begins. NaN is passed over; -infinity is the least.
struct Peak {
    float value;
    int32_t block_start;
};

inline float block_largest(const float* logits, int64_t count) {
    Vec top[kGroup];
    for (Vec& part : top) part = splat(-kInfinity);
    each_group(count, [&](int64_t token, int lanes, auto group) {
        for (int i = 0; i < group; ++i) top[i] = maximum(load_first(logits + token + i * kLanes, lanes, -kInfinity), top[i]);
    });
    return largest(maximum(maximum(top[0], top[1]), maximum(top[2], top[3])));
}

// The peak of the tokens from `first` to `end`.
inline Peak find_peak(const float* logits, int64_t first, int64_t end) {
    Peak peak{-kInfinity, static_cast<int32_t>(first)};
    for (int64_t start = first; start < end; start += kBlock) {
        const float value = block_largest(logits + start, std::min(kBlock, end - start));
        if (value > peak.value) peak = {value, static_cast<int32_t>(start)};
    }
    return peak;
}

// The lowest token that has the peak's logit; of a row without numbers, some token.
inline int64_t peak_token(const float* logits, int64_t num_tokens, Peak peak) {
    const int64_t end = std::min<int64_t>(num_tokens, peak.block_start + kBlock);
    for (int64_t token = peak.block_start; token < end; ++token)
        if (logits[token] == peak.value) return token;
    return peak.block_start;
}

// A token's weight: e^((logit - largest) / temperature), 1 for the most probable; 0 where that is below `least`.
struct Softmax {
    float largest;
    float temperature;
    float least;

    // The weights of a group of vectors of logits, in their place. NaN weighs nothing.
    template <int kCount>
    void operator()(Vec (&logits)[kCount]) const {
        // The largest comes off before the division, so that a temperature near 0 cannot overflow.
        for (Vec& part : logits) part = (part - largest) / temperature;
        exponential(logits);
        for (Vec& part : logits) part = part >= least ? part : Vec{};
    }
};

// The sum of the weights that `weigh` puts in place of a block's logits.
template <class Weigh>
inline float block_sum(const float* logits, int64_t count, const Weigh& weigh) {
    Vec sums[kGroup] = {};
    each_group(count, [&](int64_t token, int lanes, auto group) {
        Vec weights[group];
        for (int i = 0; i < group; ++i) weights[i] = load_first(logits + token + i * kLanes, lanes, -kInfinity);
        weigh(weights);
        for (int i = 0; i < group; ++i) sums[i] += weights[i];
    });
    return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// block_sums[b] = the weights of block b, for the blocks of the tokens from `first` to `end`.
template <class Weigh>
inline void sum_blocks(const float* logits, int64_t first, int64_t end, const Weigh& weigh, float* block_sums) {
    for (int64_t start = first; start < end; start += kBlock)
        block_sums[start / kBlock] = block_sum(logits + start, std::min(kBlock, end - start), weigh);
}

inline double total(const float* block_sums, int64_t num_tokens) {
    double sum = 0.0;
    for (int64_t block = 0; block < num_blocks(num_tokens); ++block) sum += block_sums[block];
    return sum;
}

}  // namespace graftwork
