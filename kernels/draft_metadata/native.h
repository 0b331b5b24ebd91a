#pragma once
#include "../step_metadata/native.h"

namespace inkling {
namespace drafting {

using metadata::Lines;

// Where `draft_metadata` writes what it returns.
struct Phase {
  int32_t *ids, *token_rows, *positions, *hidden_rows;
  int64_t *full_locations, *window_locations;
  int32_t *slots, *sources, *starts, *lengths, *kv_lengths, *destination_slots, *destination_offsets, *frontier_rows,
      *emits;
};

// Makes the returned tensors, zeroed and in the schema's order.
inline Phase make_phase(std::vector<Tensor>& tensors, int64_t packed, int64_t rows, int64_t destinations,
                        int64_t drafts) {
  Phase phase;
  auto add = [&]<typename T>(T*& pointer, std::initializer_list<int64_t> sizes) {
    tensors.push_back(make(sizeof(T) == 8 ? ScalarType::Long : ScalarType::Int, sizes));
    pointer = data<T>(tensors.back());
    std::fill_n(pointer, tensors.back().numel(), T{});
  };
  add(phase.ids, {packed + rows * drafts});
  for (auto pointer : {&phase.token_rows, &phase.positions, &phase.hidden_rows}) add(*pointer, {packed});
  for (auto pointer : {&phase.full_locations, &phase.window_locations}) add(*pointer, {packed});
  for (auto pointer : {&phase.slots, &phase.sources}) add(*pointer, {rows});
  add(phase.starts, {rows + 1});
  for (auto pointer : {&phase.lengths, &phase.kv_lengths}) add(*pointer, {rows});
  for (auto pointer : {&phase.destination_slots, &phase.destination_offsets}) add(*pointer, {rows, destinations});
  for (auto pointer : {&phase.frontier_rows, &phase.emits}) add(*pointer, {rows});
  return phase;
}

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                           Tensor, Tensor, Tensor, Tensor>;

}  // namespace drafting

inline drafting::Outputs draft_metadata(
    const Tensor& request_state, const Tensor& full_table, const Tensor& window_table, const Tensor& recent_tokens,
    const Tensor& step_tokens, const Tensor& slots, const Tensor& sources, const Tensor& starts, const Tensor& lengths,
    const Tensor& destination_slots, const Tensor& destination_offsets, const Tensor& emits, int64_t page_size,
    int64_t drafts, int64_t most) {
  using Ints = metadata::Lines<int32_t>;
  Ints states(request_state), full(full_table), window(window_table), recent(recent_tokens);
  int64_t tokens = step_tokens.size(0), rows = slots.size(0), destinations = destination_slots.size(1);
  std::vector<Tensor> t;
  t.reserve(15);
  int64_t behind = most ? drafts - 1 : drafts;  // rows of a request that are run again
  drafting::Phase phase = drafting::make_phase(t, tokens + rows * behind, rows, destinations, drafts);
  const int32_t *bounds = data<int32_t>(starts), *fed = data<int32_t>(step_tokens);
  for (int64_t row = 0; row < rows; row++) {
    int64_t slot = data<int32_t>(slots)[row], begin = phase.starts[row];
    phase.starts[row + 1] = begin;
    if (slot == 0) continue;
    const int32_t* state = states[slot];
    int64_t known = data<int32_t>(lengths)[row], first = std::max<int64_t>(known - behind, 0);
    int64_t end = state[table::LENGTH], source = data<int32_t>(sources)[row];
    bool sampled = data<int32_t>(emits)[most ? bounds[row] : row] != 0;
    phase.starts[row + 1] = begin + end - first;
    phase.slots[row] = slot;
    phase.sources[row] = source;
    phase.lengths[row] = first;
    phase.kv_lengths[row] = first + drafts;
    int32_t* ids = phase.ids + begin + row * drafts;  // of position first + 1
    for (int64_t p = first; p < end; p++) {
      int64_t i = begin + p - first, packed = bounds[row] + p - known;
      phase.token_rows[i] = row;
      phase.positions[i] = p;
      phase.hidden_rows[i] = p < known ? tokens + p % drafts : packed;
      phase.full_locations[i] = metadata::locate(full, slot, p + drafts, page_size);
      phase.window_locations[i] = metadata::locate(window, slot, p + drafts, page_size);
      if (p > first) ids[p - first - 1] = p < known ? recent[source][p % drafts] : fed[packed];
    }
    ids[end - first - 1] = sampled ? state[table::LAST_TOKEN] : 0;
    if (sampled && state[table::FINISH] == table::NONE) phase.frontier_rows[row] = begin + end - first - 1, phase.emits[row] = 1;
    for (int64_t cell = row * destinations; cell < (row + 1) * destinations; cell++) {
      int32_t destination = data<int32_t>(destination_slots)[cell], offset = data<int32_t>(destination_offsets)[cell];
      if (destination == 0 || known + offset > end) continue;
      phase.destination_slots[cell] = destination;
      phase.destination_offsets[cell] = known + offset - drafts - first;
    }
  }
  return {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12], t[13], t[14]};
}

}  // namespace inkling
