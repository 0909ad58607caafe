// A weight laid out in the panels that tiles read, and rows of it read back (the head of many models is their embedding too).

#include "adapter.h"
#include "product.h"

using namespace graftwork;

namespace {

enum FloatType : int64_t { kFloat32 = 0, kBfloat16 = 1 };

struct PackArguments {
    const void* matrix;  // [out, in]
    void* panels;
    int64_t weight_type;
    int64_t in, out_features;
};

// Place of element k of a column within its panel.
template <class W>
int64_t element_in_panel(int64_t k, int64_t column) {
    const int64_t place = place_in_panel(column);
    if constexpr (sizeof(W) == 2) return k / 2 * 2 * kPanel + 2 * place + k % 2;
    return k * kPanel + place;
}

template <class W>
void pack(const PackArguments& arguments, Team& team) {
    const Panels<W> weight{static_cast<const W*>(arguments.panels), arguments.in, arguments.out_features};
    team.share(weight.count(), [&](int64_t panel) {
        W* to = static_cast<W*>(arguments.panels) + panel * weight.stride();
        for (int64_t column = 0; column < kPanel; ++column) {
            const int64_t row = panel * kPanel + column;
            const W* from = static_cast<const W*>(arguments.matrix) + row * arguments.in;
            for (int64_t k = 0; k < weight.padded(arguments.in); ++k)
                to[element_in_panel<W>(k, column)] = row < arguments.out_features && k < arguments.in ? from[k] : W{};
        }
    });
}

void run(const PackArguments& arguments, Step&, Team& team) {
    if (arguments.weight_type == kFloat32)
        pack<float>(arguments, team);
    else
        pack<bf16>(arguments, team);
}

struct EmbeddingArguments {
    const int64_t* token_ids;  // [rows]
    const void* weight;
    int64_t weight_type;
    int64_t in, out_features;
    void* out;  // [rows, in]
};

template <class W>
void embed(const EmbeddingArguments& arguments, Step& step, Team& team) {
    const Panels<W> weight{static_cast<const W*>(arguments.weight), arguments.in, arguments.out_features};
    team.share(step.num_rows, [&](int64_t row) {
        const int64_t id = arguments.token_ids[row];
        if (id < 0 || id >= arguments.out_features) return report(step, kPositionOutside);
        const W* from = weight.data + id / kPanel * weight.stride();
        W* to = static_cast<W*>(arguments.out) + row * arguments.in;
        for (int64_t k = 0; k < arguments.in; ++k) to[k] = from[element_in_panel<W>(k, id % kPanel)];
    });
}

void run(const EmbeddingArguments& arguments, Step& step, Team& team) {
    if (arguments.weight_type == kFloat32)
        embed<float>(arguments, step, team);
    else
        embed<bf16>(arguments, step, team);
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_pack, PackArguments)
GRAFTWORK_OPERATOR(graftwork_embedding, EmbeddingArguments)
