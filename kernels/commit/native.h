#pragma once
#include "../native/common.h"
#include "../native/table.h"

#include <algorithm>

namespace inkling {

inline int32_t finish_of(const int32_t* state, const int32_t* ints, float logprob, int64_t stop_ids) {
  if (logprob != logprob) return table::NON_FINITE;
  const int32_t *stops = ints + table::INT_HEADER, *end = stops + stop_ids;
  if (std::find(stops, end, state[table::LAST_TOKEN]) != end) return table::STOP;
  return state[table::GENERATED] >= ints[table::MAX_TOKENS] ? table::MAX_LENGTH : table::NONE;
}

inline void commit(Tensor request_state, Tensor token_counts, Tensor results_int, Tensor results_float,
                   Tensor step_counter, const Tensor& request_ints, const Tensor& tokens, const Tensor& logprobs,
                   const Tensor& top_tokens, const Tensor& top_logprobs, const Tensor& slots, const Tensor& starts,
                   const Tensor& emits, int64_t stop_ids) {
  int64_t line = data<int64_t>(step_counter)[0]++ % results_int.size(0), top = top_tokens.size(1);
  const int32_t *bounds = data<int32_t>(starts), *ints = data<int32_t>(request_ints);
  for (int64_t row = 0; row < slots.size(0); row++) {
    int32_t* out = data<int32_t>(results_int) + line * results_int.stride(0) + row * results_int.size(2);
    float* out_float = data<float>(results_float) + line * results_float.stride(0) + row * results_float.size(2);
    int32_t slot = data<int32_t>(slots)[row], token = data<int32_t>(tokens)[row];
    if (slot == 0) {
      std::fill_n(out, table::RESULT_HEADER + top, 0);
      std::fill_n(out_float, table::RESULT_FLOAT_HEADER + top, 0.0f);
      continue;
    }
    int32_t* state = data<int32_t>(request_state) + slot * table::STATE_WIDTH;
    float logprob = data<float>(logprobs)[row];
    state[table::LENGTH] += bounds[row + 1] - bounds[row];
    if (data<int32_t>(emits)[row]) {
      state[table::LAST_TOKEN] = token;
      state[table::GENERATED]++;
      data<int32_t>(token_counts)[slot * token_counts.size(1) + token]++;
      state[table::FINISH] = finish_of(state, ints + slot * request_ints.size(1), logprob, stop_ids);
    }
    const int32_t header[] = {slot, token, state[table::FINISH], state[table::LENGTH]};
    std::copy_n(data<int32_t>(top_tokens) + row * top, top, std::copy_n(header, table::RESULT_HEADER, out));
    out_float[0] = logprob;
    std::copy_n(data<float>(top_logprobs) + row * top, top, out_float + table::RESULT_FLOAT_HEADER);
  }
}

}  // namespace inkling
