// What the parts of paged attention share: its arguments, the requests of a step, where their tokens lie, memory to work in.

#pragma once

#include <algorithm>

#include "step.h"
#include "tile.h"

namespace graftwork {

constexpr int64_t kChunk = 256;  // tokens of context in one piece of a decode row's attention; `_CHUNK` in attention.py

struct AttentionArguments {
    const void* q;                        // [T, num_heads, head_dim], rows `q_stride` elements apart
    const void *k_cache, *v_cache;        // [num_blocks, num_kv_heads, block_size, head_dim]
    const int32_t* query_start;           // [R + 1]
    const int32_t* context_len;           // [R]
    const int32_t* block_table;           // [R, table_width], rows `table_stride` elements apart
    float* partials;                      // [num_slots, ...]: `Partial` of every head
    float* workspace;                     // [threads, workspace_floats]: what a thread works in
    void* out;                            // [T, num_heads, head_dim]
    int64_t q_stride, table_stride, table_width;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t num_blocks, block_size;
    int64_t num_slots, workspace_floats;
    float scale;
    int32_t is_bf16;

    int64_t group() const { return num_heads / num_kv_heads; }  // query heads that share a key head
    int64_t head_elements() const { return block_size * head_dim; }  // between two key heads of a block
};

// A request's share of a step.
struct Request {
    int64_t number, first_row, num_rows, context;

    int64_t num_chunks() const { return divide_up(context, kChunk); }
};

// One that would lead outside memory has no rows, and reports it.
inline Request request_of(const AttentionArguments& a, Step& step, int64_t number) {
    const int64_t start = a.query_start[number], end = a.query_start[number + 1], context = a.context_len[number];
    if (start == end) return {number, start, 0, 0};
    if (start < 0 || end < start || end > step.num_rows || context < end - start || context > a.table_width * a.block_size) {
        report(step, kContextOutside);
        return {number, 0, 0, 0};
    }
    return {number, start, end - start, context};
}

// Offsets into a cache, for head 0, of `count` tokens of a request from the position `first` on. False where one lies outside.
inline bool locate(const AttentionArguments& a, Step& step, int64_t request, int64_t first, int64_t count, int64_t* offsets) {
    const int32_t* table = a.block_table + request * a.table_stride;
    const int64_t end = first + count;
    for (int64_t token = first; token < end;) {
        const int64_t block = table[token / a.block_size], within = token % a.block_size;
        if (block < 0 || block >= a.num_blocks) {
            report(step, kContextOutside);
            return false;
        }
        const int64_t start = block * a.num_kv_heads * a.head_elements() + within * a.head_dim;
        const int64_t length = std::min(a.block_size - within, end - token);
        for (int64_t i = 0; i < length; ++i) offsets[i] = start + i * a.head_dim;
        offsets += length;
        token += length;
    }
    return true;
}

constexpr int64_t kWeightUnit = 4 * kLanes;  // scores that become weights at a time
static_assert(kChunk % kWeightUnit == 0);

inline float largest_of(const float* scores, int64_t count) {
    Vec tops = load(scores);
    for (int64_t key = kLanes; key < count; key += kLanes) tops = maximum(load(scores + key), tops);
    return largest(tops);
}

// `count` scores, whole units, become exp(score - top); their sum.
inline float weights_of(float* scores, int64_t count, float top) {
    Vec total{};
    for (int64_t key = 0; key < count; key += kWeightUnit) {
        Vec weights[4];
        for (int i = 0; i < 4; ++i) weights[i] = load(scores + key + i * kLanes) - splat(top);
        exponential(weights);
        for (int i = 0; i < 4; ++i) {
            total += weights[i];
            store(scores + key + i * kLanes, weights[i]);
        }
    }
    return sum(total);
}

// A thread's working memory for one task, handed out piece by piece. It was allocated before the threads began: none of them could
// report that there is no more.
class Workspace {
public:
    explicit Workspace(float* memory) : next_(memory) {}

    float* take(int64_t num_floats) {
        float* piece = next_;
        next_ += num_floats;
        return piece;
    }

private:
    float* next_;
};

}  // namespace graftwork
