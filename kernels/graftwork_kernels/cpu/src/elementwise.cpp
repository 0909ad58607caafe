// Norms of rows and gated activations.

#include <algorithm>

#include "groups.h"
#include "step.h"

using namespace graftwork;

namespace {

// Rows [rows, heads, width], each head normed by itself; a plain matrix has one head a row. `total` is null where none is kept,
// `residual` where there is none; `normed` and `total` are contiguous.
struct NormArguments {
    const void* x;
    const float* residual;
    const void* weight;
    void* normed;
    float* total;
    int64_t heads;
    int64_t width;
    int64_t row_stride;
    int64_t head_stride;
    int64_t residual_row_stride;
    int64_t residual_head_stride;
    float eps;
    int32_t x_is_bf16;
    int32_t weight_is_bf16;  // and so is what is normed
};

// gate_up [rows, 2 * width], the gates first.
struct ActivationArguments {
    const void* gate_up;
    void* out;
    int64_t width;
    int64_t row_stride;
    int32_t is_gelu;
    int32_t is_bf16;
    int32_t out_is_bf16;
};

constexpr int64_t kActivationPiece = 1024;  // columns of one task, so that a row alone occupies several threads

// The factor that gives `row` a mean square of 1. The sum has four chains, in an order that the width alone decides. With `total`,
// the row is x + residual, and is written there.
template <bool kAdds, class T>
inline float norm_factor(const T* x, const float* residual, float* total, int64_t width, float eps) {
    Vec chains[kGroup] = {};
    each_group(width, [&](int64_t column, int count, auto group) {
        for (int i = 0; i < group; ++i) {
            Vec value = load_first(x + column + i * kLanes, count);
            if constexpr (kAdds) {
                if (residual != nullptr) value += load_first(residual + column + i * kLanes, count);
                store_first(total + column + i * kLanes, value, count);
            }
            chains[i] += value * value;
        }
    });
    const float squares = sum((chains[0] + chains[1]) + (chains[2] + chains[3]));
    return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

// normed = weight * (row * factor kept as T), rounded to T after each of the two.
template <class T, class Row>
inline void scale_row(const Row* row, float factor, const T* weight, T* normed, int64_t width) {
    if (std::isnan(factor)) {  // what follows rounds numbers
        for (int64_t column = 0; column < width; ++column) write(normed + column, factor);
        return;
    }
    const Vec factors = splat(factor);
    each_group(width, [&](int64_t column, int count, auto group) {
        Vec value[group];
        for (int i = 0; i < group; ++i) value[i] = keep_as<T>(load_first(row + column + i * kLanes, count) * factors);
        for (int i = 0; i < group; ++i) value[i] *= load_first(weight + column + i * kLanes, count);
        for (int i = 0; i < group; ++i) store_first(normed + column + i * kLanes, value[i], count);
    });
}

template <class X, class T>
void norm_row(const NormArguments& arguments, int64_t row) {
    const int64_t width = arguments.width;
    const T* weight = static_cast<const T*>(arguments.weight);
    for (int64_t head = 0; head < arguments.heads; ++head) {
        const X* x = static_cast<const X*>(arguments.x) + row * arguments.row_stride + head * arguments.head_stride;
        const int64_t start = (row * arguments.heads + head) * width;
        T* normed = static_cast<T*>(arguments.normed) + start;
        if (arguments.total == nullptr) {
            scale_row(x, norm_factor<false>(x, nullptr, nullptr, width, arguments.eps), weight, normed, width);
            continue;
        }
        const float* residual = arguments.residual;
        if (residual != nullptr) residual += row * arguments.residual_row_stride + head * arguments.residual_head_stride;
        float* total = arguments.total + start;
        scale_row(total, norm_factor<true>(x, residual, total, width, arguments.eps), weight, normed, width);
    }
}

void run(const NormArguments& arguments, Step& step, Team& team) {
    team.share(step.num_rows, [&](int64_t row) {
        if (!arguments.weight_is_bf16)
            norm_row<float, float>(arguments, row);
        else if (arguments.x_is_bf16)
            norm_row<bf16, bf16>(arguments, row);
        else
            norm_row<float, bf16>(arguments, row);
    });
}

// silu(g) = g / (1 + e^-g). With y = sqrt(2/pi) (g + 0.044715 g^3), gelu(g) = g (1 + tanh y) / 2 = g / (1 + e^-2y), where nothing
// cancels.
template <bool kIsGelu>
inline Vec exponent(Vec gate) {
    if constexpr (kIsGelu) return gate * (-1.5957691216f - 0.0713548163f * gate * gate);
    return -gate;
}

template <bool kIsGelu, class T, class Out>
void activate_piece(const ActivationArguments& arguments, int64_t row, int64_t first) {
    const T* gates = static_cast<const T*>(arguments.gate_up) + row * arguments.row_stride + first;
    const T* up = gates + arguments.width;
    Out* out = static_cast<Out*>(arguments.out) + row * arguments.width + first;
    each_group(std::min(kActivationPiece, arguments.width - first), [&](int64_t column, int count, auto group) {
        Vec gate[group], value[group];
        for (int i = 0; i < group; ++i) gate[i] = load_first(gates + column + i * kLanes, count);
        for (int i = 0; i < group; ++i) value[i] = exponent<kIsGelu>(gate[i]);
        exponential(value);
        for (int i = 0; i < group; ++i) value[i] = gate[i] / (1.0f + value[i]);
        for (int i = 0; i < group; ++i) value[i] *= load_first(up + column + i * kLanes, count);
        for (int i = 0; i < group; ++i) store_first(out + column + i * kLanes, value[i], count);
    });
}

template <bool kIsGelu>
void activate(const ActivationArguments& arguments, int64_t row, int64_t first) {
    if (arguments.is_bf16)
        activate_piece<kIsGelu, bf16, bf16>(arguments, row, first);
    else if (arguments.out_is_bf16)
        activate_piece<kIsGelu, float, bf16>(arguments, row, first);
    else
        activate_piece<kIsGelu, float, float>(arguments, row, first);
}

void run(const ActivationArguments& arguments, Step& step, Team& team) {
    const int64_t pieces = (arguments.width + kActivationPiece - 1) / kActivationPiece;
    team.share(step.num_rows * pieces, [&](int64_t task) {
        const int64_t row = task / pieces, first = task % pieces * kActivationPiece;
        arguments.is_gelu ? activate<true>(arguments, row, first) : activate<false>(arguments, row, first);
    });
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_norm, NormArguments)
GRAFTWORK_OPERATOR(graftwork_activation, ActivationArguments)
