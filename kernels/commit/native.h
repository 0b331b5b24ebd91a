#pragma once
#include "../step_metadata/native.h"

namespace inkling {
namespace committing {

using metadata::Lines;

// Why a row that has just emitted LAST_TOKEN ends, if it does.
inline int32_t finish_of(const int32_t* state, const int32_t* ints, float logprob, int64_t stop_ids) {
  if (logprob != logprob) return table::NON_FINITE;
  const int32_t *stops = ints + table::INT_HEADER, *end = stops + stop_ids;
  if (std::find(stops, end, state[table::LAST_TOKEN]) != end) return table::STOP;
  return state[table::GENERATED] >= ints[table::MAX_TOKENS] ? table::MAX_LENGTH : table::NONE;
}

// How many leading drafts are the target's tokens, or as many as FORCE_ACCEPT says.
inline int64_t accepted(const int32_t* guesses, int64_t count, const int32_t* tokens, int32_t forced, int64_t step) {
  if (forced) return std::min<int64_t>((forced - 1) >> (4 * (step % 2)) & 15, count);
  return std::mismatch(guesses, guesses + count, tokens).first - guesses;
}

// Records the boundaries that a row of `length` tokens has reached at `end`, and takes them off its list.
inline void pass(int32_t* waiting, int64_t width, int32_t* snapshot_lengths, const int32_t* slots,
                 const int32_t* offsets, int64_t destinations, int64_t length, int64_t end) {
  int64_t passed = 0;
  for (; passed < destinations && offsets[passed] > 0 && length + offsets[passed] <= end; passed++)
    if (slots[passed]) snapshot_lengths[slots[passed]] = length + offsets[passed];
  metadata::take(waiting, width, passed);
}

}  // namespace committing

inline void commit(Tensor request_state, Tensor token_counts, Tensor results_int, Tensor results_float,
                   Tensor step_counter, Tensor snapshot_slots, Tensor snapshot_lengths, const Tensor& request_ints,
                   const Tensor& tokens, const Tensor& logprobs, const Tensor& top_tokens, const Tensor& top_logprobs,
                   const Tensor& step_tokens, const Tensor& slots, const Tensor& starts, const Tensor& lengths,
                   const Tensor& emits, const Tensor& destination_slots, const Tensor& destination_offsets,
                   int64_t stop_ids, int64_t drafts) {
  using committing::Lines;
  int64_t step = data<int64_t>(step_counter)[0]++, top = top_tokens.size(1), destinations = destination_slots.size(1);
  int64_t line = step % results_int.size(0), most = results_float.size(2) / (1 + top);
  Lines<int32_t> states(request_state), counts(token_counts), limits(request_ints), waiting(snapshot_slots);
  const int32_t *bounds = data<int32_t>(starts), *chosen = data<int32_t>(tokens);
  for (int64_t row = 0; row < slots.size(0); row++) {
    int32_t* out = data<int32_t>(results_int) + line * results_int.stride(0) + row * results_int.size(2);
    float* out_float = data<float>(results_float) + line * results_float.stride(0) + row * results_float.size(2);
    std::fill_n(out, results_int.size(2), 0);
    std::fill_n(out_float, results_float.size(2), 0.0f);
    int32_t slot = data<int32_t>(slots)[row];
    if (slot == 0) continue;
    int32_t *state = states[slot], *values = out + table::RESULT_HEADER;
    const int32_t *ints = limits[slot], *guesses = data<int32_t>(step_tokens) + bounds[row] + 1;
    int64_t given = bounds[row + 1] - bounds[row], first = drafts ? bounds[row] : row;
    int64_t guessed = drafts ? given - 1 : 0, emitted = 0;
    if (data<int32_t>(emits)[first]) {
      int64_t run = 1 + committing::accepted(guesses, guessed, chosen + first, ints[table::FORCE_ACCEPT], step);
      STD_TORCH_CHECK(run <= most, "result lines hold ", most, " tokens, not ", run);
      for (bool ended = false; emitted < run && !ended; emitted++) {
        int64_t s = first + emitted;
        state[table::LAST_TOKEN] = values[emitted] = emitted + 1 < run ? guesses[emitted] : chosen[s];
        state[table::GENERATED]++;
        counts[slot][state[table::LAST_TOKEN]]++;
        out_float[emitted] = data<float>(logprobs)[s];
        state[table::FINISH] = committing::finish_of(state, ints, out_float[emitted], stop_ids);
        std::copy_n(data<int32_t>(top_tokens) + s * top, top, values + most + emitted * top);
        std::copy_n(data<float>(top_logprobs) + s * top, top, out_float + most + emitted * top);
        ended = state[table::FINISH] != table::NONE;
      }
    }
    state[table::LENGTH] += drafts && emitted ? emitted : given;
    const int64_t header[] = {slot, emitted, state[table::FINISH], state[table::LENGTH], guessed};
    std::copy_n(header, table::RESULT_HEADER, out);
    if (drafts)
      committing::pass(waiting[slot], waiting.width, data<int32_t>(snapshot_lengths),
                       data<int32_t>(destination_slots) + row * destinations,
                       data<int32_t>(destination_offsets) + row * destinations, destinations,
                       data<int32_t>(lengths)[row], state[table::LENGTH]);
  }
}

}  // namespace inkling
