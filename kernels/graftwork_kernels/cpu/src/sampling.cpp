// Drawing a token from each row of logits, and the noise it is drawn with.

#include "philox.h"
#include "select.h"
#include "step.h"

using namespace graftwork;

namespace {

struct UniformArguments {
    const int64_t* seed;
    const int32_t* choice;
    const int32_t* position;
    float* uniform;
};

// logits [rows, num_tokens]. Scratch: a peak for each piece and a sum for each block of every row; three rows for each thread.
struct SampleArguments {
    const float* logits;
    int64_t row_stride;
    int64_t num_tokens;
    const float* temperature;
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const int64_t* seed;
    const int32_t* choice;
    const int32_t* position;
    int64_t* tokens;
    Peak* peaks;
    float* block_sums;
    float* thread_rows;
};

constexpr int64_t kUniformPiece = 256;

void run(const UniformArguments& arguments, Step& step, Team& team) {
    team.share((step.num_rows + kUniformPiece - 1) / kUniformPiece, [&](int64_t piece) {
        const int64_t end = std::min(step.num_rows, (piece + 1) * kUniformPiece);
        for (int64_t row = piece * kUniformPiece; row < end; ++row)
            arguments.uniform[row] = philox_uniform(static_cast<uint64_t>(arguments.seed[row]),
                                                    static_cast<uint32_t>(arguments.choice[row]),
                                                    static_cast<uint32_t>(arguments.position[row]));
    });
}

// One row and how it is drawn from.
class Row {
public:
    Row(const SampleArguments& arguments, int64_t row)
        : arguments_(arguments),
          row_(row),
          num_tokens_(arguments.num_tokens),
          logits_(arguments.logits + row * arguments.row_stride),
          peaks_(arguments.peaks + row * num_pieces(num_tokens_)),
          block_sums_(arguments.block_sums + row * num_blocks(num_tokens_)) {}

    void scan(int64_t piece) const { peaks_[piece] = find_peak(logits_, piece * kPiece, end(piece)); }

    // Rows that top-k or top-p cut are weighed when they are.
    void weigh(int64_t piece) const {
        if (is_greedy() || has_cut()) return;
        const Softmax softmax = this->softmax(peak());
        sum_blocks(logits_, piece * kPiece, end(piece), softmax, block_sums_);
    }

    // After all pieces have been scanned and weighed; `rank` says whose scratch is used.
    int64_t draw(int rank) const {
        const Peak peak = this->peak();
        if (is_greedy() || std::isinf(peak.value)) return peak_token(logits_, num_tokens_, peak);
        const Softmax softmax = this->softmax(peak);
        if (!has_cut()) {
            const int64_t place = invert(logits_, num_tokens_, softmax);
            return place < 0 ? peak_token(logits_, num_tokens_, peak) : place;
        }
        float* kept = arguments_.thread_rows + 3 * rank * num_tokens_;
        int32_t* ids = reinterpret_cast<int32_t*>(kept + num_tokens_);
        const int64_t num_kept = cut(softmax, kept, ids, kept + 2 * num_tokens_);
        sum_blocks(kept, 0, num_kept, softmax, block_sums_);
        const int64_t place = invert(kept, num_kept, softmax);
        return place < 0 ? peak_token(logits_, num_tokens_, peak) : ids[place];
    }

private:
    bool is_greedy() const { return !(arguments_.temperature[row_] > 0.0f); }
    bool has_top_k() const { return arguments_.top_k[row_] > 0 && arguments_.top_k[row_] < num_tokens_; }
    bool has_top_p() const { return arguments_.top_p[row_] < 1.0f; }
    bool has_cut() const { return has_top_k() || has_top_p(); }
    int64_t end(int64_t piece) const { return std::min(num_tokens_, (piece + 1) * kPiece); }

    Softmax softmax(Peak peak) const { return {peak.value, arguments_.temperature[row_], arguments_.min_p[row_]}; }

    // The first of the row's largest peaks.
    Peak peak() const {
        Peak first = peaks_[0];
        for (int64_t piece = 1; piece < num_pieces(num_tokens_); ++piece)
            if (peaks_[piece].value > first.value) first = peaks_[piece];
        return first;
    }

    // What top-k and then top-p keep of the row, by ascending id; its number.
    int64_t cut(const Softmax& softmax, float* kept, int32_t* ids, float* sorted) const {
        const float* logits = logits_;
        const int32_t* logit_ids = nullptr;
        int64_t count = num_tokens_;
        if (has_top_k()) {
            const Counted amount{static_cast<double>(arguments_.top_k[row_])};
            count = keep(logits, logit_ids, count, find_cut(logits, count, amount, sorted), kept, ids);
            logits = kept;
            logit_ids = ids;
        }
        if (has_top_p()) {
            const Weighed amount{{softmax.largest, softmax.temperature, 0.0f}, arguments_.top_p[row_]};
            count = keep(logits, logit_ids, count, find_cut(logits, count, amount, sorted), kept, ids);
        }
        return count;
    }

    // The first place whose running sum of weights exceeds the row's noise times their total; -1 where nothing weighs anything.
    int64_t invert(const float* logits, int64_t count, const Softmax& softmax) const {
        const float noise = philox_uniform(static_cast<uint64_t>(arguments_.seed[row_]),
                                           static_cast<uint32_t>(arguments_.choice[row_]),
                                           static_cast<uint32_t>(arguments_.position[row_]));
        const float whole = static_cast<float>(total(block_sums_, count));
        // Held below the total, whatever the rounding, so that some place lies beyond the target.
        const float target = std::min(noise * whole, std::nextafter(whole, 0.0f));
        double below = 0.0;
        int64_t block = 0;
        while (block + 1 < num_blocks(count) && static_cast<float>(below + block_sums_[block]) <= target)
            below += block_sums_[block++];

        float weights[kBlock];
        const int64_t start = block * kBlock, num_weights = std::min(kBlock, count - start);
        each_group(num_weights, [&](int64_t place, int lanes, auto group) {
            Vec part[group];
            for (int i = 0; i < group; ++i) part[i] = load_first(logits + start + place + i * kLanes, lanes, -kInfinity);
            softmax(part);
            for (int i = 0; i < group; ++i) store_first(weights + place + i * kLanes, part[i], lanes);
        });
        int64_t found = -1;  // the block's sum was rounded in another order: the target may lie a hair beyond its last weight
        for (int64_t place = 0; place < num_weights; ++place) {
            if (!(weights[place] > 0.0f)) continue;
            found = start + place;
            below += weights[place];
            if (static_cast<float>(below) > target) break;
        }
        return found;
    }

    const SampleArguments& arguments_;
    const int64_t row_;
    const int64_t num_tokens_;
    const float* const logits_;
    Peak* const peaks_;
    float* const block_sums_;
};

void run(const SampleArguments& arguments, Step& step, Team& team) {
    const int64_t num_rows = step.num_rows, pieces = num_pieces(arguments.num_tokens);
    if (num_rows >= 2 * team.size) {  // a row at a time stays in cache between its passes
        team.share(num_rows, [&](int64_t number) {
            const Row row(arguments, number);
            for (int64_t piece = 0; piece < pieces; ++piece) row.scan(piece);
            for (int64_t piece = 0; piece < pieces; ++piece) row.weigh(piece);
            arguments.tokens[number] = row.draw(team.rank);
        });
        return;
    }
    team.share(num_rows * pieces, [&](int64_t task) { Row(arguments, task / pieces).scan(task % pieces); });
    team.share(num_rows * pieces, [&](int64_t task) { Row(arguments, task / pieces).weigh(task % pieces); });
    team.share(num_rows, [&](int64_t row) { arguments.tokens[row] = Row(arguments, row).draw(team.rank); });
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_uniform, UniformArguments)
GRAFTWORK_OPERATOR(graftwork_sample, SampleArguments)
