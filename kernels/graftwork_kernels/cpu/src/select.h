// The first tokens by (logit descending, id ascending), as many as make up a given amount, found without sorting the row: a
// histogram over the logits' range says in which of its buckets the edge lies, and only that bucket's tokens are looked at again.

#pragma once

#include <algorithm>
#include <functional>

#include "vocabulary.h"

namespace graftwork {

constexpr int kBuckets = 1024;    // of equal width, in descending order of logits; one more takes what is no number
constexpr int64_t kFewTokens = 256;  // are sorted

// Tokens with a logit above `logit` stay, and of those that equal it the first `num_equal`.
struct Cut {
    float logit;
    int64_t num_equal;
};

// Every token counts as 1; the first `needed` are wanted.
struct Counted {
    double num_needed;

    template <int kCount>
    void operator()(Vec (&logits)[kCount]) const {
        for (Vec& part : logits) part = splat(1.0f);
    }
    double needed(double) const { return num_needed; }
};

// Every token counts as its weight; those that hold `share` of the total are wanted.
struct Weighed {
    Softmax softmax;
    float share;

    template <int kCount>
    void operator()(Vec (&logits)[kCount]) const {
        softmax(logits);
    }
    double needed(double total) const { return share * static_cast<float>(total); }
};

// Where a logit lies between two others. Halved, so that no difference overflows.
struct Buckets {
    float half_high;
    float factor;

    // False where the range is too small, or not a number, to be divided.
    bool divides() const { return factor > 0.0f && factor < kInfinity; }

    Ints of(Vec logits) const {
        const Vec place = (half_high - 0.5f * logits) * factor;
        const Vec last = splat(static_cast<float>(kBuckets));
        return __builtin_convertvector(place < last ? place : last, Ints);  // NaN is not below the last
    }
};

// Buckets between the largest and the smallest finite logit.
inline Buckets make_buckets(const float* logits, int64_t count) {
    Vec high = splat(-kInfinity), low = splat(kInfinity);
    each_group(count, [&](int64_t token, int lanes, auto group) {
        for (int i = 0; i < group; ++i) {
            const Vec part = load_first(logits + token + i * kLanes, lanes, -kInfinity);
            high = maximum(part, high);
            const Vec finite = part > -kInfinity ? part : splat(kInfinity);
            low = finite < low ? finite : low;
        }
    });
    const float half_high = 0.5f * largest(high), half_low = -0.5f * largest(-low);
    return {half_high, (kBuckets - 1) / (half_high - half_low)};
}

template <class Amount>
inline void add_up(const float* logits, int64_t count, const Buckets& buckets, const Amount& amount, double* amounts) {
    std::fill_n(amounts, kBuckets + 1, 0.0);
    each_group(count, [&](int64_t token, int lanes, auto group) {
        Vec part[group];
        int32_t place[group * kLanes];
        float value[group * kLanes];
        for (int i = 0; i < group; ++i) part[i] = load_first(logits + token + i * kLanes, lanes, -kInfinity);
        for (int i = 0; i < group; ++i) {
            const Ints places = buckets.of(part[i]);
            std::memcpy(place + i * kLanes, &places, sizeof(places));
        }
        amount(part);
        for (int i = 0; i < group; ++i) store(value + i * kLanes, part[i]);
        for (int lane = 0; lane < group * kLanes; ++lane) amounts[place[lane]] += value[lane];
    });
}

// The logits that lie in one bucket, written to `found`, which may be `logits` itself; their number.
inline int64_t collect(const float* logits, int64_t count, const Buckets& buckets, int bucket, float* found) {
    int64_t num_found = 0;
    each_group(count, [&](int64_t token, int lanes, auto group) {
        Ints hit{};
        int32_t hits[group * kLanes];
        for (int i = 0; i < group; ++i) {
            const Ints part = buckets.of(load_first(logits + token + i * kLanes, lanes, -kInfinity)) == bucket;
            std::memcpy(hits + i * kLanes, &part, sizeof(part));
            hit |= part;
        }
        if (!any(hit)) return;
        for (int lane = 0; lane < (group - 1) * kLanes + lanes; ++lane) {
            found[num_found] = logits[token + lane];
            num_found -= hits[lane];  // -1 where it holds
        }
    });
    return num_found;
}

// The cut among `count` logits, all of them numbers, sorted here; `before` comes ahead of them. A negative `needed` is not known
// yet.
template <class Amount>
inline Cut cut_sorted(float* logits, int64_t count, const Amount& amount, double before, double needed) {
    if (!std::is_sorted(logits, logits + count, std::greater<float>())) std::sort(logits, logits + count, std::greater<float>());
    const auto weigh = [&](int64_t first, float* values) {
        Vec part[1] = {load_first(logits + first, static_cast<int>(std::min<int64_t>(kLanes, count - first)), -kInfinity)};
        amount(part);
        store(values, part[0]);
    };
    float values[kLanes];
    if (needed < 0.0) {
        double sum = before;
        for (int64_t token = 0; token < count; ++token) {
            if (token % kLanes == 0) weigh(token, values);
            sum += values[token % kLanes];
        }
        needed = amount.needed(sum);
    }
    int64_t last = 0;  // the cut comes after it
    for (int64_t token = 0; token < count; ++token) {
        if (token % kLanes == 0) weigh(token, values);
        before += values[token % kLanes];
        last = token;
        if (before >= needed) break;
    }
    int64_t num_equal = 0;
    while (num_equal <= last && logits[last - num_equal] == logits[last]) ++num_equal;
    return {logits[last], num_equal};
}

// The last bucket that holds anything. A bucket that was found to have the edge is added up again in parts, which are rounded in
// another way: their sum may miss what is needed by a hair, and the edge is then its last token, not that of the whole row.
inline int last_filled(const double* amounts) {
    int bucket = kBuckets - 1;
    while (bucket > 0 && !(amounts[bucket] > 0.0)) --bucket;
    return bucket;
}

// Where the first tokens that make up what `amount` needs end. -infinity is never among them; `scratch` has room for all.
template <class Amount>
inline Cut find_cut(const float* logits, int64_t count, const Amount& amount, float* scratch) {
    double amounts[kBuckets + 1];
    double before = 0.0, needed = -1.0;
    for (int round = 0; count > kFewTokens; ++round) {
        const Buckets buckets = make_buckets(logits, count);
        if (!buckets.divides()) break;
        add_up(logits, count, buckets, amount, amounts);
        if (needed < 0.0) {
            double sum = 0.0;
            for (int bucket = 0; bucket < kBuckets; ++bucket) sum += amounts[bucket];
            needed = amount.needed(sum);
        }
        const int last = round == 0 ? kBuckets : last_filled(amounts);
        int bucket = 0;
        while (bucket < last && before + amounts[bucket] < needed) before += amounts[bucket++];
        if (bucket == kBuckets) return {-kInfinity, 0};
        const int64_t num_found = collect(logits, count, buckets, bucket, scratch);
        const bool narrowed = num_found < count;
        logits = scratch;
        count = num_found;
        if (!narrowed) break;
    }
    int64_t num_numbers = 0;
    for (int64_t token = 0; token < count; ++token)
        if (logits[token] > -kInfinity) scratch[num_numbers++] = logits[token];
    if (num_numbers == 0) return {-kInfinity, 0};
    return cut_sorted(scratch, num_numbers, amount, before, needed);
}

// What the cut leaves, in ascending order of ids, written to `kept` and `kept_ids`, which may be `logits` and `ids`; its number.
// Without `ids`, ids are places.
inline int64_t keep(const float* logits, const int32_t* ids, int64_t count, Cut cut, float* kept, int32_t* kept_ids) {
    int64_t num_kept = 0;
    each_group(count, [&](int64_t first, int lanes, auto group) {
        Ints candidates = load_first(logits + first, lanes, -kInfinity) >= cut.logit;
        for (int i = 1; i < group; ++i) candidates |= load(logits + first + i * kLanes) >= cut.logit;
        if (!any(candidates)) return;
        for (int64_t token = first; token < first + (group - 1) * kLanes + lanes; ++token) {
            const float logit = logits[token];
            bool stays = logit > cut.logit;
            if (logit == cut.logit) stays = cut.num_equal-- > 0;
            kept[num_kept] = logit;  // without a branch, which would be guessed wrong for many a token
            kept_ids[num_kept] = ids == nullptr ? static_cast<int32_t>(token) : ids[token];
            num_kept += stays;
        }
    });
    return num_kept;
}

}  // namespace graftwork
