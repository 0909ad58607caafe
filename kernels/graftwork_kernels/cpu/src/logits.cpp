// What is done to logits before a token is drawn: the search for rows that are not finite, biases and penalties.

#include "groups.h"
#include "step.h"

using namespace graftwork;

namespace {

struct FiniteArguments {
    const float* logits;
    int64_t row_stride;
    int64_t num_tokens;
    bool* finite;
};

// Lists of tokens for each row, laid end to end.
struct Entries {
    const int32_t* row_start;
    const int32_t* token_id;
    int64_t num_entries;
};

struct BiasArguments {
    float* logits;
    int64_t row_stride;
    int64_t num_tokens;
    Entries entries;
    const float* value;
};

struct PenaltyArguments {
    float* logits;
    int64_t row_stride;
    int64_t num_tokens;
    Entries entries;
    const int32_t* output_count;
    const float* repetition;
    const float* frequency;
    const float* presence;
};

// A maximum of numbers below infinity, not all of them -infinity.
bool is_finite(const float* logits, int64_t num_tokens) {
    Ints all_below[kGroup], any_above[kGroup];
    for (int i = 0; i < kGroup; ++i) all_below[i] = Ints{} - 1, any_above[i] = Ints{};
    const float infinity = std::numeric_limits<float>::infinity();
    each_group(num_tokens, [&](int64_t token, int lanes, auto group) {
        for (int i = 0; i < group; ++i) {
            const Vec part = load_first(logits + token + i * kLanes, lanes, -infinity);
            all_below[i] &= part < infinity;  // NaN is not
            any_above[i] |= part > -infinity;
        }
    });
    const Ints below = all_below[0] & all_below[1] & all_below[2] & all_below[3];
    return !any(~below) && any(any_above[0] | any_above[1] | any_above[2] | any_above[3]);
}

void run(const FiniteArguments& arguments, Step& step, Team& team) {
    team.share(step.num_rows, [&](int64_t row) {
        arguments.finite[row] = is_finite(arguments.logits + row * arguments.row_stride, arguments.num_tokens);
    });
}

// body(entry, logit) for each of a row's entries that lies inside.
template <class Body>
void each_entry(const Entries& entries, int64_t row, float* logits, int64_t num_tokens, Step& step, Body&& body) {
    const int64_t start = entries.row_start[row], end = entries.row_start[row + 1];
    if (start < 0 || end > entries.num_entries) {
        report(step, kPositionOutside);
        return;
    }
    for (int64_t entry = start; entry < end; ++entry) {
        const int64_t token = entries.token_id[entry];
        if (token < 0 || token >= num_tokens)
            report(step, kPositionOutside);
        else
            body(entry, logits[token]);
    }
}

void run(const BiasArguments& arguments, Step& step, Team& team) {
    team.share(step.num_rows, [&](int64_t row) {
        float* logits = arguments.logits + row * arguments.row_stride;
        each_entry(arguments.entries, row, logits, arguments.num_tokens, step,
                   [&](int64_t entry, float& logit) { logit += arguments.value[entry]; });
    });
}

// A product kept from melting into one operation with the sum that it goes into, which would be rounded once and not twice.
inline float rounded(float product) {
    volatile float kept = product;
    return kept;
}

void run(const PenaltyArguments& arguments, Step& step, Team& team) {
    team.share(step.num_rows, [&](int64_t row) {
        const float repetition = arguments.repetition[row];
        const float frequency = arguments.frequency[row], presence = arguments.presence[row];
        float* logits = arguments.logits + row * arguments.row_stride;
        each_entry(arguments.entries, row, logits, arguments.num_tokens, step, [&](int64_t entry, float& logit) {
            const int32_t count = arguments.output_count[entry];
            float x = logit > 0.0f ? logit / repetition : rounded(logit * repetition);
            x = x - rounded(frequency * static_cast<float>(count));
            x = x - rounded(presence * static_cast<float>(count > 0));
            logit = x;
        });
    });
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_finite_rows, FiniteArguments)
GRAFTWORK_OPERATOR(graftwork_logit_bias, BiasArguments)
GRAFTWORK_OPERATOR(graftwork_penalties, PenaltyArguments)
