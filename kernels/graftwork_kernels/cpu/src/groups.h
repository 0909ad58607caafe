// Rows taken a few vectors at a time, so that the chains of operations of several overlap, and the ends of rows, of which only the
// first lanes lie in memory.

#pragma once

#include <type_traits>

#include "vec.h"

namespace graftwork {

constexpr int kGroup = 4;

// body(column, count, group) for all of a row. A group, a type whose value is its number of vectors, has kGroup whole ones, or is a
// single one with `count` of its lanes in the row.
template <class Body>
inline void each_group(int64_t width, Body&& body) {
    int64_t column = 0;
    for (; column + kGroup * kLanes <= width; column += kGroup * kLanes)
        body(column, kLanes, std::integral_constant<int, kGroup>{});
    for (; column + kLanes <= width; column += kLanes) body(column, kLanes, std::integral_constant<int, 1>{});
    if (column < width) body(column, static_cast<int>(width - column), std::integral_constant<int, 1>{});
}

// The first `count` (1 .. kLanes) elements, `filler` in the rest; nothing beyond them is touched.
template <class T>
inline Vec load_first(const T* from, int count, float filler = 0.0f) {
    if (count == kLanes) return load(from);
    float lanes[kLanes];
    store(lanes, splat(filler));
    for (int lane = 0; lane < count; ++lane) lanes[lane] = read(from + lane);
    return load(lanes);
}

template <class T>
inline void store_first(T* to, Vec value, int count) {
    if (count == kLanes) return store(to, value);
    T lanes[kLanes];
    store(lanes, value);
    std::memcpy(to, lanes, count * sizeof(T));
}

// Whether any lane of a comparison holds.
inline bool any(Ints lanes) {
    uint64_t words[kLanes / 2], found = 0;
    std::memcpy(words, &lanes, sizeof(lanes));
    for (const uint64_t word : words) found |= word;
    return found != 0;
}

// The fp32 that is left of a number kept as T. NaN may come out as anything.
template <class T>
inline Vec keep_as(Vec number) {
    if constexpr (sizeof(T) == 4) return number;
    const Bits bits = reinterpret_cast<Bits>(number);
    return reinterpret_cast<Vec>((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

}  // namespace graftwork
