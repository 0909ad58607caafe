// The entry: a list of commands, run by one team of threads from beginning to end.

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "step.h"

using namespace graftwork;

// Every command, in order, all of a command's results visible to the next. Threads are those of OpenMP, which torch uses too: two
// pools on the same cores would fight.
extern "C" void graftwork_run(const Command* commands, int64_t num_commands, Step* step,
                              [[maybe_unused]] int32_t num_threads) {
    std::atomic<int64_t> tickets{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        int rank = 0, size = 1;
#if defined(_OPENMP)
        rank = omp_get_thread_num();
        size = omp_get_num_threads();
#endif
        Team team(rank, size, tickets);
        for (int64_t number = 0; number < num_commands; ++number) commands[number].call(commands[number].arguments, step, &team);
    }
}
