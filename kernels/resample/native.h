#pragma once
#include "../sample/native.h"

namespace inkling {

inline void resample(const Tensor& logits, const Tensor& token_counts, const Tensor& request_state,
                     const Tensor& request_ints, const Tensor& request_floats, const Tensor& tokens,
                     const Tensor& token_rows, const Tensor& slots, const Tensor& starts, const Tensor& lengths,
                     const Tensor& sample_rows, const Tensor& unsure, int64_t stop_ids, int64_t bias_ids, int64_t top,
                     int64_t drafts, Tensor chosen, Tensor logprobs, Tensor top_tokens, Tensor top_logprobs) {
  int64_t vocab = logits.size(1);
  STD_TORCH_CHECK(token_counts.size(1) == vocab, "token counts and logits differ in vocabulary");
  STD_TORCH_CHECK(top == top_tokens.size(1), "results of ", top_tokens.size(1), " top logprobs, not ", top);
  sampling::Step step{token_counts, request_state, request_ints, request_floats, tokens,   token_rows, slots,
                      starts,       lengths,       sample_rows,  stop_ids,       bias_ids, drafts};
  sampling::Results results{chosen, logprobs, top_tokens, top_logprobs};
  for (int64_t s = 0; s < logits.size(0); s++)
    if (data<int32_t>(unsure)[s]) sampling::draw_sample(step, data<float>(logits) + s * vocab, vocab, s, results);
}

}  // namespace inkling
