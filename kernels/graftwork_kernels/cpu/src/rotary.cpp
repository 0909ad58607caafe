// Turning queries and keys to their positions, and putting keys and values where the paged cache has room for them: one pass.

#include <algorithm>

#include "step.h"
#include "vec.h"

using namespace graftwork;

namespace {

constexpr int64_t kRowsPerTask = 4;

struct RotaryArguments {
    const void *q, *k, *v;           // [T, heads, head_dim], rows `*_stride` elements apart
    const int64_t* positions;        // [T]
    const float* cos_sin;            // [num_positions, head_dim]: cosines, then sines
    void *k_cache, *v_cache;         // [num_blocks, num_kv_heads, block_size, head_dim]
    const int64_t* kv_slot;          // [T]
    void* out;                       // [T, num_heads, head_dim]
    int64_t q_stride, k_stride, v_stride;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t num_positions, num_blocks, block_size;
    int64_t is_bf16;
};

// One head, its first half paired with its second.
template <class T>
void turn(const T* head, const float* cos_sin, int64_t half, T* out) {
    const float *cos = cos_sin, *sin = cos_sin + half;
    int64_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Vec first = load(head + i), second = load(head + half + i);
        const Vec cosine = load(cos + i), sine = load(sin + i);
        store(out + i, first * cosine - second * sine);
        store(out + half + i, second * cosine + first * sine);
    }
    for (; i < half; ++i) {
        const float first = read(head + i), second = read(head + half + i);
        write(out + i, first * cos[i] - second * sin[i]);
        write(out + half + i, second * cos[i] + first * sin[i]);
    }
}

template <class T>
void turn_row(const RotaryArguments& a, Step& step, int64_t row) {
    const int64_t position = a.positions[row], slot = a.kv_slot[row];
    if (position < 0 || position >= a.num_positions) return report(step, kPositionOutside);
    if (slot >= a.num_blocks * a.block_size) return report(step, kSlotOutside);
    const float* cos_sin = a.cos_sin + position * a.head_dim;
    const int64_t half = a.head_dim / 2;

    const T* q = static_cast<const T*>(a.q) + row * a.q_stride;
    T* out = static_cast<T*>(a.out) + row * a.num_heads * a.head_dim;
    for (int64_t head = 0; head < a.num_heads; ++head) turn(q + head * a.head_dim, cos_sin, half, out + head * a.head_dim);

    if (slot < 0) return;
    const T* k = static_cast<const T*>(a.k) + row * a.k_stride;
    const T* v = static_cast<const T*>(a.v) + row * a.v_stride;
    const int64_t head_elements = a.block_size * a.head_dim;
    const int64_t place = slot / a.block_size * a.num_kv_heads * head_elements + slot % a.block_size * a.head_dim;
    for (int64_t head = 0; head < a.num_kv_heads; ++head) {
        turn(k + head * a.head_dim, cos_sin, half, static_cast<T*>(a.k_cache) + place + head * head_elements);
        std::copy_n(v + head * a.head_dim, a.head_dim, static_cast<T*>(a.v_cache) + place + head * head_elements);
    }
}

void run(const RotaryArguments& arguments, Step& step, Team& team) {
    team.share((step.num_rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task) {
        const int64_t end = std::min(step.num_rows, (task + 1) * kRowsPerTask);
        for (int64_t row = task * kRowsPerTask; row < end; ++row)
            arguments.is_bf16 ? turn_row<bf16>(arguments, step, row) : turn_row<float>(arguments, step, row);
    });
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_rotary_and_write_kv, RotaryArguments)
