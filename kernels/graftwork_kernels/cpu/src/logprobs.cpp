// Log probabilities of given tokens and of each row's most probable ones.

#include "select.h"
#include "step.h"

using namespace graftwork;

namespace {

// logits [rows, num_tokens] in bf16 or fp32. Scratch for each thread: three rows and a sum for each block.
struct LogprobArguments {
    const void* logits;
    int64_t row_stride;
    int64_t num_tokens;
    const int64_t* token_ids;
    int64_t num_top;
    float* logprobs;
    int64_t* top_ids;
    float* top_logprobs;
    float* thread_rows;
    float* block_sums;
    int64_t is_bf16;
};

// A token's share of the sum of probabilities, that of the most probable being 1.
struct Likelihood {
    float largest;

    template <int kCount>
    void operator()(Vec (&logits)[kCount]) const {
        for (Vec& part : logits) part -= largest;
        exponential(logits);
    }
};

float log_total(const float* logits, int64_t num_tokens, float* block_sums) {
    const Peak peak = find_peak(logits, 0, num_tokens);
    if (std::isinf(peak.value)) {  // the sum says nothing: the limit is the peak itself, unless NaN is among the logits
        for (int64_t token = 0; token < num_tokens; ++token)
            if (std::isnan(logits[token])) return logits[token];
        return peak.value;
    }
    sum_blocks(logits, 0, num_tokens, Likelihood{peak.value}, block_sums);
    return static_cast<float>(peak.value + std::log(total(block_sums, num_tokens)));
}

// The first `num_top` tokens by (logit descending, id ascending). Those above -infinity are found by a cut; where there are fewer,
// -infinity follows by ascending id, and then NaN.
void find_top(const float* logits, int64_t num_tokens, int64_t num_top, float* kept, int32_t* ids) {
    if (num_top == 0) return;
    const Cut cut = find_cut(logits, num_tokens, Counted{static_cast<double>(num_top)}, kept);
    int64_t count = keep(logits, nullptr, num_tokens, cut, kept, ids);
    std::sort(ids, ids + count, [&](int32_t one, int32_t other) {
        return logits[one] > logits[other] || (logits[one] == logits[other] && one < other);
    });
    for (const bool takes_nan : {false, true})
        for (int64_t token = 0; token < num_tokens && count < num_top; ++token)
            if (takes_nan ? std::isnan(logits[token]) : logits[token] == -kInfinity) ids[count++] = static_cast<int32_t>(token);
}

const float* as_fp32(const LogprobArguments& arguments, int64_t row, float* wide) {
    const int64_t start = row * arguments.row_stride;
    if (!arguments.is_bf16) return static_cast<const float*>(arguments.logits) + start;
    const bf16* logits = static_cast<const bf16*>(arguments.logits) + start;
    each_group(arguments.num_tokens, [&](int64_t token, int lanes, auto group) {
        for (int i = 0; i < group; ++i)
            store_first(wide + token + i * kLanes, load_first(logits + token + i * kLanes, lanes), lanes);
    });
    return wide;
}

void run(const LogprobArguments& arguments, Step& step, Team& team) {
    const int64_t num_tokens = arguments.num_tokens, num_top = arguments.num_top;
    float* wide = arguments.thread_rows + 3 * team.rank * num_tokens;
    float* kept = wide + num_tokens;
    int32_t* ids = reinterpret_cast<int32_t*>(kept + num_tokens);
    team.share(step.num_rows, [&](int64_t row) {
        const float* logits = as_fp32(arguments, row, wide);
        const float log_sum = log_total(logits, num_tokens, arguments.block_sums + team.rank * num_blocks(num_tokens));
        const int64_t token = arguments.token_ids[row];
        if (token < 0 || token >= num_tokens)
            report(step, kPositionOutside);
        else
            arguments.logprobs[row] = logits[token] - log_sum;
        find_top(logits, num_tokens, num_top, kept, ids);
        for (int64_t place = 0; place < num_top; ++place) {
            arguments.top_ids[row * num_top + place] = ids[place];
            arguments.top_logprobs[row * num_top + place] = logits[ids[place]] - log_sum;
        }
    });
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_logprobs, LogprobArguments)
