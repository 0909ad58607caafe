// Causal attention of a step's rows over the paged cache: which tasks a step falls into, and who does them.
//
// Every thread counts the tasks for itself from the lengths of the requests: a request with several rows is cut in tiles of them,
// one with a single row is a task, or, while there are slots for the partials, a task for each chunk of its context.

#include "attention_decode.h"
#include "attention_prefill.h"

using namespace graftwork;

namespace {

// The tasks of one request among those of the step.
struct Work {
    Request request;
    int64_t first_task, num_tasks;
    int64_t first_slot, num_slots;  // none where the request is not split
};

enum class Phase { kAttend, kGather };

// Walks over the requests of a step, in ascending order.
class Schedule {
public:
    Schedule(const AttentionArguments& arguments, Step& step, int64_t num_slots, Phase phase)
        : a_(arguments), step_(step), num_slots_(num_slots), phase_(phase) {
        Work work = begin();
        while (work.request.number < step_.num_requests) work = after(work);
        num_tasks = work.first_task;
        work_ = begin();
    }

    int64_t num_tasks;

    // The request that `task` belongs to; tasks are asked for in ascending order.
    const Work& find(int64_t task) {
        while (task >= work_.first_task + work_.num_tasks) work_ = after(work_);
        return work_;
    }

private:
    Work begin() { return work_of(0, 0, 0); }

    Work after(const Work& work) {
        return work_of(work.request.number + 1, work.first_task + work.num_tasks, work.first_slot + work.num_slots);
    }

    Work work_of(int64_t number, int64_t first_task, int64_t first_slot) {
        if (number >= step_.num_requests) return {{number, 0, 0, 0}, first_task, 0, first_slot, 0};
        const Request request = request_of(a_, step_, number);
        const int64_t chunks = request.num_rows == 1 ? request.num_chunks() : 0;
        const bool is_split = chunks > 1 && first_slot + chunks <= num_slots_;
        int64_t pieces = divide_up(request.num_rows, rows_per_tile(a_));  // the tasks of one key head
        if (is_split) pieces = chunks;
        if (phase_ == Phase::kGather) pieces = is_split ? 1 : 0;
        return {request, first_task, pieces * a_.num_kv_heads, first_slot, is_split ? chunks : 0};
    }

    const AttentionArguments& a_;
    Step& step_;
    const int64_t num_slots_;
    const Phase phase_;
    Work work_;
};

template <class T>
void attend(const AttentionArguments& a, Step& step, const Work& work, int64_t task, float* memory) {
    const int64_t kv_head = task % a.num_kv_heads, piece = task / a.num_kv_heads;
    if (work.request.num_rows > 1) {
        const int64_t tile = work.num_tasks / a.num_kv_heads - 1 - piece;  // the longest first
        PrefillTask<T>(a, step, work.request, tile * rows_per_tile(a), kv_head, memory).attend();
    } else if (work.num_slots == 0) {
        DecodeTask<T>(a, step, work.request, kv_head, memory).attend();
    } else {
        const int64_t slot = (work.first_slot + piece) * a.num_kv_heads + kv_head;
        float* partial = a.partials + slot * DecodeTask<T>::partial_size(a);
        DecodeTask<T>(a, step, work.request, kv_head, memory).attend_chunk(piece, partial);
    }
}

template <class T>
void gather(const AttentionArguments& a, Step& step, const Work& work, int64_t kv_head, float* memory) {
    const int64_t size = DecodeTask<T>::partial_size(a);
    const float* partials = a.partials + (work.first_slot * a.num_kv_heads + kv_head) * size;
    DecodeTask<T>(a, step, work.request, kv_head, memory).gather(partials, a.num_kv_heads * size);
}

// Rows before those of the first request, and after those of the last.
template <class T>
void clear_rest(const AttentionArguments& a, const Step& step) {
    const int64_t width = a.num_heads * a.head_dim;
    const int64_t first = std::clamp<int64_t>(a.query_start[0], 0, step.num_rows);
    const int64_t last = std::clamp<int64_t>(a.query_start[step.num_requests], first, step.num_rows);
    T* out = static_cast<T*>(a.out);
    std::fill_n(out, first * width, T{});
    std::fill_n(out + last * width, (step.num_rows - last) * width, T{});
}

template <class T>
void attend_step(const AttentionArguments& a, Step& step, Team& team) {
    if (std::max(DecodeTask<T>::workspace(a), PrefillTask<T>::workspace(a)) > a.workspace_floats) return report(step, kNoRoom);
    float* memory = a.workspace + team.rank * a.workspace_floats;
    // A thread alone has nobody to share chunks with; the result is the same.
    const int64_t num_slots = team.size > 1 ? a.num_slots : 0;
    Schedule attending(a, step, num_slots, Phase::kAttend);
    team.share(attending.num_tasks + 1, [&](int64_t task) {
        if (task == attending.num_tasks) return clear_rest<T>(a, step);
        const Work& work = attending.find(task);
        attend<T>(a, step, work, task - work.first_task, memory);
    });
    Schedule gathering(a, step, num_slots, Phase::kGather);
    if (gathering.num_tasks == 0) return;
    team.share(gathering.num_tasks, [&](int64_t task) {
        const Work& work = gathering.find(task);
        gather<T>(a, step, work, task - work.first_task, memory);
    });
}

void run(const AttentionArguments& arguments, Step& step, Team& team) {
    arguments.is_bf16 ? attend_step<bf16>(arguments, step, team) : attend_step<float>(arguments, step, team);
}

}  // namespace

GRAFTWORK_OPERATOR(graftwork_paged_attention, AttentionArguments)
