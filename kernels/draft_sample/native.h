#pragma once
#include "../sample/native.h"

namespace inkling {
namespace drafting {

// The rows of a draft phase whose guesses of `depth` are made.
struct Rows {
  const Tensor &token_counts, &request_state, &request_ints, &request_floats, &draft_tokens, &slots, &starts, &lengths;
  int64_t depth, stop_ids, bias_ids;

  // The best of the `count` logits `raw` from the id `first` on; id 0 and infinite if one is not finite.
  sampling::Best best(int64_t row, const float* raw, int64_t count, int64_t first) const {
    if (count == 0) return {};
    if (!sampling::all_finite(raw, count)) return {0, sampling::INFINITE};
    int64_t slot = data<int32_t>(slots)[row];
    sampling::Request request{data<int32_t>(request_ints) + slot * request_ints.size(1),
                              data<int32_t>(token_counts) + slot * token_counts.size(1) + first,
                              data<float>(request_floats) + slot * request_floats.size(1),
                              data<int32_t>(request_state)[slot * table::STATE_WIDTH + table::GENERATED],
                              stop_ids,
                              bias_ids,
                              data<int32_t>(draft_tokens) + slot * draft_tokens.size(1),
                              depth,
                              first};
    const int32_t* bounds = data<int32_t>(starts) + row;
    int64_t position = data<int32_t>(lengths)[row] + bounds[1] - bounds[0] + 1 + depth;
    return request.choose(raw, count, position, /*filtered=*/false);
  }

  void write(int64_t row, sampling::Best best, int64_t drafts, Tensor& ids) const {
    int64_t slot = data<int32_t>(slots)[row], end = data<int32_t>(starts)[row + 1];
    data<int32_t>(draft_tokens)[slot * draft_tokens.size(1) + depth] = best.id;
    data<int32_t>(ids)[end + row * drafts + depth] = best.id;
  }
};

}  // namespace drafting

inline void draft_sample(const Tensor& logits, const Tensor& token_counts, const Tensor& request_state,
                         const Tensor& request_ints, const Tensor& request_floats, Tensor draft_tokens, Tensor ids,
                         const Tensor& slots, const Tensor& starts, const Tensor& lengths, const Tensor& emits,
                         int64_t depth, int64_t drafts, int64_t stop_ids, int64_t bias_ids) {
  int64_t vocab = logits.size(1);
  STD_TORCH_CHECK(token_counts.size(1) >= vocab, "drafts have a larger vocabulary than the target");
  drafting::Rows drafted{token_counts, request_state, request_ints, request_floats, draft_tokens, slots,
                         starts,       lengths,       depth,        stop_ids,       bias_ids};
  for (int64_t row = 0; row < logits.size(0); row++)
    if (data<int32_t>(emits)[row])
      drafted.write(row, drafted.best(row, data<float>(logits) + row * vocab, vocab, 0), drafts, ids);
}

}  // namespace inkling
