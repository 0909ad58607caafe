// How operators run: a step's live sizes, the team of threads that shares the work, and the form that every operator has.
//
// All threads of a team call every operator of a step, one after the other, and deal its tasks among themselves. Tasks go to
// whoever is free, so a thread that the system takes away for a while holds up one task and not its half of the work. What a task
// computes depends on its number alone.

#pragma once

#include <atomic>
#include <cstdint>

namespace graftwork {

// What a step decides; everything else about a call stands in the operator's arguments.
struct Step {
    int64_t num_rows;
    int64_t num_requests;
    int64_t fault;  // 0, or the number of a `Fault`: what an operator refused to read
};

enum Fault : int64_t {
    kAdapterOutside = 1,  // a row names an adapter that memory does not hold
    kRowOutside = 2,      // a site record or a row offset points outside memory
    kPositionOutside = 3, // a position or a token id beyond its table
    kSlotOutside = 4,     // a place to write keys and values beyond the cache
    kContextOutside = 5,  // a request's rows, context or blocks lie beyond the step's rows, its block table or the cache
    kNoRoom = 6,          // an operator needs more memory to work in than it was given
};

// Any thread may; which of several faults is kept does not matter.
inline void report(Step& step, Fault fault) {
    __atomic_store_n(&step.fault, static_cast<int64_t>(fault), __ATOMIC_RELAXED);
}

// One thread's view of its team.
class Team {
public:
    Team(int rank, int size, std::atomic<int64_t>& tickets) : rank(rank), size(size), tickets_(tickets) {}

    const int rank;
    const int size;

    // Call body(task) once for each task of 0 .. num_tasks, somewhere in the team. All are done, and their results seen by all,
    // when it returns. Every thread of the team must come here, and an operator must end here.
    template <class Body>
    void share(int64_t num_tasks, Body&& body) {
        if (size == 1) {
            for (int64_t task = 0; task < num_tasks; ++task) body(task);
            return;
        }
        // Tickets only ever grow: a loop uses one for each task, and one for each thread to see that none is left.
        const int64_t first = next_;
        next_ += num_tasks + size;
        for (;;) {
            const int64_t task = tickets_.fetch_add(1, std::memory_order_relaxed) - first;
            if (task >= num_tasks) break;
            body(task);
        }
#pragma omp barrier
    }

private:
    std::atomic<int64_t>& tickets_;
    int64_t next_ = 0;
};

using Operator = void (*)(const void* arguments, Step* step, Team* team);

struct Command {
    Operator call;
    const void* arguments;
};

}  // namespace graftwork

// Exports `run(arguments, step, team)` under `name`, with the size of its arguments, which the caller checks against its own.
#define GRAFTWORK_OPERATOR(name, Arguments)                                                      \
    extern "C" const int64_t name##_argument_bytes = sizeof(Arguments);                          \
    extern "C" void name(const void* arguments, graftwork::Step* step, graftwork::Team* team) {  \
        run(*static_cast<const Arguments*>(arguments), *step, *team);                            \
    }
