// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

#pragma once

#include <cstdint>

namespace graftwork {

// The noise of one drawn token, in [0, 1): the first word's upper 24 bits, for key = seed and counter = (choice, position, 0, 0).
inline float philox_uniform(uint64_t seed, uint32_t choice, uint32_t position) {
    uint32_t word[4] = {choice, position, 0, 0};
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t{0xD2511F53} * word[0], second = uint64_t{0xCD9E8D57} * word[2];
        word[0] = static_cast<uint32_t>(second >> 32) ^ word[1] ^ key[0];
        word[1] = static_cast<uint32_t>(second);
        word[2] = static_cast<uint32_t>(first >> 32) ^ word[3] ^ key[1];
        word[3] = static_cast<uint32_t>(first);
        key[0] += 0x9E3779B9;  // the golden ratio and sqrt(3) - 1, as 32-bit fractions
        key[1] += 0xBB67AE85;
    }
    return static_cast<float>(word[0] >> 8) * 0x1p-24f;
}

}  // namespace graftwork
