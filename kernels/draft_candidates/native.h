#pragma once
#include "../draft_sample/native.h"
#include "../native/exchange.h"

namespace inkling {

inline void draft_candidates(const Tensor& logits, const Tensor& token_counts, const Tensor& request_state,
                             const Tensor& request_ints, const Tensor& request_floats, Tensor draft_tokens, Tensor ids,
                             const Tensor& slots, const Tensor& starts, const Tensor& lengths, const Tensor& emits,
                             int64_t depth, int64_t drafts, int64_t stop_ids, int64_t bias_ids, const Tensor& peers,
                             Tensor exchange, const Tensor& step_counter, const Tensor& rank, int64_t call,
                             int64_t calls, int64_t world, int64_t vocab) {
  using sampling::Best;
  int64_t rows = logits.size(0), columns = logits.size(1);
  int64_t first = std::min(data<int32_t>(rank)[0] * columns, vocab), count = std::min(columns, vocab - first);
  STD_TORCH_CHECK(token_counts.size(1) >= vocab, "drafts have a larger vocabulary than the target");
  Exchange ranks(peers, exchange, step_counter, rank, call, calls, world);
  drafting::Rows drafted{token_counts, request_state, request_ints, request_floats, draft_tokens, slots,
                         starts,       lengths,       depth,        stop_ids,       bias_ids};
  Best* own = ranks.part<Best>(rows);
  for (int64_t row = 0; row < rows; row++)
    if (data<int32_t>(emits)[row])
      own[row] = drafted.best(row, data<float>(logits) + row * columns, count, first);
  std::vector<const Best*> parts = ranks.publish<Best>();
  for (int64_t row = 0; row < rows; row++) {
    if (!data<int32_t>(emits)[row]) continue;
    Best best;
    for (const Best* part : parts)
      if (part && part[row].value > best.value) best = part[row];
    drafted.write(row, best, drafts, ids);
  }
}

}  // namespace inkling
