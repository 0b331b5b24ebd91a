#pragma once
#include "../native/common.h"
#include "../native/table.h"

#include <algorithm>

namespace inkling {
namespace metadata {

// The lines of a 2-D tensor.
template <typename T>
struct Lines {
  T* first;
  int64_t count, width;

  explicit Lines(const Tensor& tensor) : first(data<T>(tensor)), count(tensor.size(0)), width(tensor.size(1)) {}

  T* operator[](int64_t line) const {
    STD_TORCH_CHECK(line >= 0 && line < count, "line ", line, " of a table of ", count);
    return first + line * width;
  }
};

struct Table {
  Lines<int32_t> state, ints;
  Lines<float> floats;
  Lines<int32_t> counts, full_pages, window_pages, snapshots;
  int32_t* snapshot_lengths;
  Lines<int32_t> drafts;
};

// One-shot lines name a slot; applying a line clears it.
inline void admit(const Table& table, Lines<int32_t> ints, Lines<float> floats) {
  for (int64_t i = 0; i < ints.count; i++) {
    int32_t* line = ints[i];
    int64_t slot = line[table::ADMIT_SLOT];
    if (slot == 0) continue;
    std::copy_n(line + table::ADMIT_HEADER, table.ints.width, table.ints[slot]);
    std::copy_n(floats[i], table.floats.width, table.floats[slot]);
    int32_t* state = table.state[slot];
    std::fill_n(state, table::STATE_WIDTH, 0);
    state[table::LENGTH] = line[table::ADMIT_LENGTH];
    state[table::GENERATED] = line[table::ADMIT_GENERATED];
    std::fill_n(table.counts[slot], table.counts.width, 0);
    std::fill_n(table.snapshots[slot], table.snapshots.width, 0);
    line[table::ADMIT_SLOT] = 0;
  }
}

inline void update_pages(const Table& table, Lines<int32_t> updates) {
  for (int64_t i = 0; i < updates.count; i++) {
    int32_t* line = updates[i];  // table, slot, index, page
    if (line[1] == 0) continue;
    const auto& pages = line[0] == 0 ? table.full_pages : table.window_pages;
    STD_TORCH_CHECK(line[2] >= 0 && line[2] < pages.width, "page index ", line[2], " of ", pages.width);
    pages[line[1]][line[2]] = line[3];
    line[1] = 0;
  }
}

inline void update_snapshots(const Table& table, Lines<int32_t> updates) {
  for (int64_t i = 0; i < updates.count; i++) {
    int32_t* line = updates[i];  // slot, destinations
    if (line[0] == 0) continue;
    std::copy_n(line + 1, table.snapshots.width, table.snapshots[line[0]]);
    line[0] = 0;
  }
}

// Physical location of a position: logical pages go round the table's width (the window's ring).
inline int64_t locate(const Lines<int32_t>& pages, int64_t slot, int64_t position, int64_t page_size) {
  return pages[slot][position / page_size % pages.width] * page_size + position % page_size;
}

// A token fed from the host is counted: as seen in the prompt, or as sampled when it is replayed.
inline void count_token(const Table& table, int64_t slot, int64_t token, int64_t position) {
  if (token < 0 || token >= table.counts.width) return;  // padded vocabulary
  int32_t& count = table.counts[slot][token];
  if (position < table.ints[slot][table::PROMPT_LENGTH])
    count |= table::PROMPT_SEEN;
  else
    count++;
}

// Drops the first `count` entries of a slot's list of destinations; zeros move in.
inline void take(int32_t* waiting, int64_t width, int64_t count) {
  int64_t kept = std::max<int64_t>(width - count, 0);
  std::copy_n(waiting + width - kept, kept, waiting);
  std::fill(waiting + kept, waiting + width, 0);
}

// Destinations of the grid boundaries in (length, length + count], `taken` off the slot's list.
inline void cross_grid(const Table& table, int64_t slot, int64_t length, int64_t count, int64_t grid, bool taken,
                       int64_t limit, int32_t* destination_slots, int32_t* offsets) {
  int32_t* waiting = table.snapshots[slot];
  int64_t crossed = (length + count) / grid - length / grid;
  STD_TORCH_CHECK(crossed <= limit, crossed, " grid boundaries in one row, at most ", limit, " can be");
  for (int64_t j = 0; j < crossed; j++) {
    int64_t boundary = (length / grid + 1 + j) * grid, slots = table.snapshots.width;
    int32_t destination = j < slots ? waiting[j] : 0;
    destination_slots[j] = destination;
    if (destination != 0 || !taken) offsets[j] = boundary - length;
    if (destination != 0 && taken) table.snapshot_lengths[destination] = boundary;
  }
  if (taken) take(waiting, table.snapshots.width, crossed);
}

// Where the op writes what it returns.
struct Step {
  int32_t *tokens, *positions, *token_rows;
  int64_t *full_locations, *window_locations;
  int32_t *slots, *sources, *starts, *lengths, *destination_slots, *destination_offsets, *sample_rows, *emits;
};

// Makes the returned tensors, zeroed and in the schema's order.
inline Step make_step(std::vector<Tensor>& tensors, int64_t tokens, int64_t rows, int64_t destinations,
                      int64_t samples) {
  Step step;
  auto add = [&]<typename T>(T*& pointer, std::initializer_list<int64_t> sizes) {
    tensors.push_back(make(sizeof(T) == 8 ? ScalarType::Long : ScalarType::Int, sizes));
    pointer = data<T>(tensors.back());
    std::fill_n(pointer, tensors.back().numel(), T{});
  };
  for (auto pointer : {&step.tokens, &step.positions, &step.token_rows}) add(*pointer, {tokens});
  for (auto pointer : {&step.full_locations, &step.window_locations}) add(*pointer, {tokens});
  for (auto pointer : {&step.slots, &step.sources}) add(*pointer, {rows});
  add(step.starts, {rows + 1});
  add(step.lengths, {rows});
  for (auto pointer : {&step.destination_slots, &step.destination_offsets}) add(*pointer, {rows, destinations});
  for (auto pointer : {&step.sample_rows, &step.emits}) add(*pointer, {samples});
  return step;
}

// Valid drafts of a slot, at most `most` and no more than the request may still have tokens.
inline int64_t draft_count(const Table& table, int64_t slot, int64_t most) {
  const int32_t* state = table.state[slot];
  int64_t left = int64_t{table.ints[slot][table::MAX_TOKENS]} - state[table::GENERATED] - 1;
  return std::max<int64_t>(std::min({most, int64_t{state[table::DRAFTS]}, left}), 0);
}

// The tokens of one live row, at step.starts[row]; `fed` null: LAST_TOKEN and drafts.
inline void place_tokens(const Table& table, Step& step, int64_t row, const int32_t* fed, int64_t count,
                         int64_t page_size) {
  int64_t slot = step.slots[row], length = step.lengths[row];
  for (int64_t i = 0; i < count; i++) {
    int64_t t = step.starts[row] + i, position = length + i;
    step.tokens[t] = fed ? fed[i] : i == 0 ? table.state[slot][table::LAST_TOKEN] : table.drafts[slot][i - 1];
    step.positions[t] = position;
    step.token_rows[t] = row;
    step.full_locations[t] = locate(table.full_pages, slot, position, page_size);
    step.window_locations[t] = locate(table.window_pages, slot, position, page_size);
    if (fed) count_token(table, slot, fed[i], position);
  }
}

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                           Tensor, Tensor>;

}  // namespace metadata

inline metadata::Outputs step_metadata(
    Tensor request_state, Tensor request_ints, Tensor request_floats, Tensor token_counts, Tensor full_table,
    Tensor window_table, Tensor snapshot_slots, Tensor snapshot_lengths, const Tensor& draft_tokens,
    const Tensor& row_slots, const Tensor& row_counts, const Tensor& row_sources, const Tensor& row_flags, const Tensor& token_ids,
    Tensor admit_ints, const Tensor& admit_floats, Tensor page_updates, Tensor snapshot_updates, int64_t page_size,
    int64_t snapshot_grid, int64_t destinations, int64_t drafts) {
  using namespace metadata;
  using Ints = Lines<int32_t>;
  Table table{Ints(request_state), Ints(request_ints), Lines<float>(request_floats), Ints(token_counts),
              Ints(full_table), Ints(window_table), Ints(snapshot_slots), data<int32_t>(snapshot_lengths),
              Ints(draft_tokens)};
  admit(table, Ints(admit_ints), Lines<float>(admit_floats));
  update_pages(table, Ints(page_updates));
  update_snapshots(table, Ints(snapshot_updates));

  int64_t rows = row_slots.size(0), capacity = token_ids.size(0), fed = 0;
  std::vector<Tensor> t;
  t.reserve(13);
  Step step = make_step(t, capacity, rows, destinations, drafts ? capacity : rows);
  for (int64_t row = 0; row < rows; row++) {
    int64_t slot = data<int32_t>(row_slots)[row], given = data<int32_t>(row_counts)[row], count = given;
    int32_t source = data<int32_t>(row_sources)[row], flags = data<int32_t>(row_flags)[row];
    int64_t start = step.starts[row];
    STD_TORCH_CHECK(drafts == 0 || given <= 1, "rows of a verify step are given one token");
    bool live = slot != 0 && count > 0 && table.state[slot][table::FINISH] == table::NONE;
    if (live) {
      bool from_table = flags & table::FROM_TABLE, samples = flags & table::SAMPLE;
      STD_TORCH_CHECK(!from_table || given == 1, "a row fed from the table has one token");
      if (from_table && samples) count += draft_count(table, slot, drafts);
      STD_TORCH_CHECK(std::max(fed + given, start + count) <= capacity, "the rows hold more than ", capacity,
                      " tokens");
      step.slots[row] = slot;
      step.sources[row] = source ? source : slot;
      step.lengths[row] = table.state[slot][table::LENGTH];
      place_tokens(table, step, row, from_table ? nullptr : data<int32_t>(token_ids) + fed, count, page_size);
      cross_grid(table, slot, step.lengths[row], count, snapshot_grid, drafts == 0, destinations,
                 step.destination_slots + row * destinations, step.destination_offsets + row * destinations);
      for (int64_t t = drafts ? start : start + count - 1; samples && t < start + count; t++) {
        int64_t s = drafts ? t : row;
        step.sample_rows[s] = t, step.emits[s] = 1;
      }
    }
    step.starts[row + 1] = start + (live ? count : 0);
    fed += given;
  }
  return {t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], t[9], t[10], t[11], t[12]};
}

}  // namespace inkling
