#pragma once
#include "../native/common.h"
#include "../native/table.h"

#include <algorithm>

namespace inkling {

inline void draft_commit(Tensor request_state, Tensor draft_hidden, Tensor recent_tokens, const Tensor& request_ints,
                         const Tensor& hidden, const Tensor& ids, const Tensor& slots, const Tensor& starts,
                         const Tensor& lengths, const Tensor& destination_slots, const Tensor& destination_offsets,
                         const Tensor& emits, int64_t drafts) {
  int64_t width = hidden.size(1), destinations = destination_slots.size(1);
  const int32_t* bounds = data<int32_t>(starts);
  by_dtype(hidden, [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    for (int64_t row = 0; row < slots.size(0); row++) {
      int64_t slot = data<int32_t>(slots)[row], first = data<int32_t>(lengths)[row], begin = bounds[row];
      if (slot == 0) continue;
      const int32_t* tokens = data<int32_t>(ids) + begin + row * drafts;  // of position first + 1
      auto keep = [&](int64_t target, int64_t end) {
        int64_t oldest = std::max<int64_t>(end - drafts, 0);
        for (int64_t p = oldest; p < end; p++) {
          int64_t entry = target * drafts + p % drafts;
          const T* from = data<T>(hidden) + (begin + p - first) * width;
          std::copy_n(from, width, data<T>(draft_hidden) + entry * width);
          if (p > oldest) data<int32_t>(recent_tokens)[entry] = tokens[p - first - 1];
        }
      };
      for (int64_t cell = row * destinations; cell < (row + 1) * destinations; cell++)
        if (int64_t target = data<int32_t>(destination_slots)[cell])
          keep(target, first + drafts + data<int32_t>(destination_offsets)[cell]);
      keep(slot, first + bounds[row + 1] - begin);
      int32_t limit = data<int32_t>(request_ints)[slot * request_ints.size(1) + table::DRAFT_LIMIT];
      data<int32_t>(request_state)[slot * table::STATE_WIDTH + table::DRAFTS] =
          data<int32_t>(emits)[row] ? std::min<int32_t>(limit, drafts) : 0;
    }
  });
}

}  // namespace inkling
