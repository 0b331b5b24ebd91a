#pragma once
#include "../sample/native.h"

namespace inkling {

inline void draft_sample(const Tensor& logits, const Tensor& token_counts, const Tensor& request_state,
                         const Tensor& request_ints, const Tensor& request_floats, Tensor draft_tokens, Tensor ids,
                         const Tensor& slots, const Tensor& starts, const Tensor& lengths, const Tensor& emits,
                         int64_t depth, int64_t drafts, int64_t stop_ids, int64_t bias_ids) {
  int64_t vocab = logits.size(1);
  STD_TORCH_CHECK(token_counts.size(1) >= vocab, "drafts have a larger vocabulary than the target");
  const int32_t* bounds = data<int32_t>(starts);
  for (int64_t row = 0; row < logits.size(0); row++) {
    if (data<int32_t>(emits)[row] == 0) continue;
    int64_t slot = data<int32_t>(slots)[row], end = bounds[row + 1];
    int32_t* guesses = data<int32_t>(draft_tokens) + slot * draft_tokens.size(1);
    const float* raw = data<float>(logits) + row * vocab;
    sampling::Request request{data<int32_t>(request_ints) + slot * request_ints.size(1),
                              data<int32_t>(token_counts) + slot * token_counts.size(1),
                              data<float>(request_floats) + slot * request_floats.size(1),
                              data<int32_t>(request_state)[slot * table::STATE_WIDTH + table::GENERATED],
                              stop_ids,
                              bias_ids,
                              guesses,
                              depth};
    int64_t position = data<int32_t>(lengths)[row] + end - bounds[row] + 1 + depth;
    bool finite = sampling::all_finite(raw, vocab);
    guesses[depth] = finite ? request.choose(raw, vocab, position, /*filtered=*/false) : 0;
    data<int32_t>(ids)[end + row * drafts + depth] = guesses[depth];
  }
}

}  // namespace inkling
