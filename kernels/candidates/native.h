// Each rank's record of a sample: its head, its top raw logits, its candidates (see `reference.py`).
#pragma once
#include "../native/exchange.h"
#include "../sample/native.h"

namespace inkling {
namespace sampling {

constexpr double CLOSE = 1e-5, EXACT = 1e-9;
constexpr int64_t RECORD_HEADER = 8;  // words

struct Candidate {
  float value, raw;
  int32_t id;
  bool operator<(const Candidate& other) const {  // comes before
    return value > other.value || (value == other.value && id < other.id);
  }
};

struct Head {
  int64_t ids;  // that the rank has
  float maximum, sum;  // of the raw logits
  double mass;         // of the processed ones over T, relative to the best
  Candidate best;
};

// A record of `top` raw logits and `budget` candidates in memory of the exchange.
struct Record {
  Head* head;
  Candidate *tops, *list;

  Record(const double* part, int64_t s, int64_t top, int64_t budget) {
    static_assert(sizeof(Head) <= 8 * RECORD_HEADER && sizeof(Candidate) <= 16);
    double* at = const_cast<double*>(part) + s * words(top, budget);
    head = reinterpret_cast<Head*>(at);
    tops = reinterpret_cast<Candidate*>(at + RECORD_HEADER);
    list = tops + top;
  }
  static int64_t words(int64_t top, int64_t budget) { return RECORD_HEADER + 2 * top + 3 * budget; }
};

inline bool filters(const Request& request) {
  const float* floats = request.floats;
  return floats[table::TEMPERATURE] != 0 &&
         (floats[table::MIN_P] > 0 || request.ints[table::TOP_K] > 0 || floats[table::TOP_P] < 1);
}

// Fills the record of a sample with this rank's `count` logits.
inline void fill_record(Record record, const Request& request, const float* raw, int64_t count, int64_t position,
                        int64_t top, int64_t budget) {
  int32_t first = static_cast<int32_t>(request.first);
  *record.head = {count, NOT_FINITE, 0, 0, {}};
  if (count == 0 || !all_finite(raw, count)) return;
  float maximum = largest(raw, count);
  record.head->maximum = maximum;
  record.head->sum = lane_sum(count, [&](int64_t i) { return exponential(raw[i] - maximum); });
  std::vector<int32_t> ids(std::min(top, count));
  top_ids(raw, count, ids.size(), ids.data());
  for (size_t i = 0; i < ids.size(); i++) record.tops[i] = {raw[ids[i]], raw[ids[i]], ids[i] + first};
  if (!filters(request)) {
    Best best = request.choose(raw, count, position, /*filtered=*/false);
    int64_t at = std::clamp<int64_t>(best.id - first, 0, count - 1);  // without a best one the id is 0
    record.head->best = {best.value, raw[at], best.id};
    return;
  }
  std::vector<float> scaled(raw, raw + count);
  if (request.changes_logits()) request.process(scaled);
  for (float& value : scaled) value /= request.floats[table::TEMPERATURE];
  ids.resize(count);
  for (int64_t i = 0; i < count; i++) ids[i] = static_cast<int32_t>(i);
  int64_t given = std::min(budget, count);
  std::partial_sort(ids.begin(), ids.begin() + given, ids.end(), Descending{scaled.data()});
  for (int64_t i = 0; i < given; i++) record.list[i] = {scaled[ids[i]], raw[ids[i]], ids[i] + first};
  for (float value : scaled) record.head->mass += exponential(value - scaled[ids[0]]);
}

struct Choice {
  Candidate token{};
  bool sure = false;
};

// The choice of a row with filters from the ranks' records.
inline Choice draw_candidates(const std::vector<Record>& records, const Request& request, int64_t position,
                              int64_t budget) {
  float min_p = request.floats[table::MIN_P], top_p = request.floats[table::TOP_P];
  int64_t top_k = request.ints[table::TOP_K];
  std::vector<Candidate> order;
  bool known = true;  // no id was left out
  Candidate last{};   // behind it a rank may have left out one that would come next
  for (const Record& record : records) {
    int64_t ids = record.head->ids, given = std::min(ids, budget);
    order.insert(order.end(), record.list, record.list + given);
    if (ids > budget && (known || record.list[given - 1] < last)) last = record.list[given - 1];
    known &= ids <= budget;
  }
  std::sort(order.begin(), order.end());
  if (!known)
    while (last < order.back()) order.pop_back();
  int64_t count = order.size();
  float best = order[0].value;
  if (!std::isfinite(best)) return {};
  std::vector<float> values(count), weights(count);
  for (int64_t i = 0; i < count; i++) values[i] = order[i].value, weights[i] = exponential(values[i] - best);
  bool closed = known || weights.back() < min_p * (1 - CLOSE) || values.back() == -INFINITE;
  if (top_k > 0) closed |= top_k <= count, count = std::min(count, top_k);
  auto kept = [&](int64_t i) { return weights[i] >= min_p && values[i] > -INFINITE; };
  double listed = 0, whole = 0, before = 0, error = EXACT;
  for (int64_t i = 0; i < count; i++) listed += kept(i) ? weights[i] : 0;
  whole = listed;
  bool sure = closed;
  if (top_p < 1 && !closed) {
    whole = 0, error = CLOSE;
    for (const Record& record : records) whole += record.head->mass * exponential(record.list[0].value - best);
    sure = min_p == 0 && top_k <= 0 && listed > (top_p + error) * whole;
  }
  Candidate token{-INFINITE, 0, std::numeric_limits<int32_t>::max()};
  for (int64_t i = 0; i < count; i++) {
    if (!kept(i)) continue;
    if (top_p < 1 && i > 0) {
      sure &= std::abs(before - top_p * whole) > error * whole;
      if (before >= top_p * whole) break;
    }
    before += weights[i];
    token = std::min(token, {request.noisy(values[i], order[i].id, position), order[i].raw, order[i].id});
  }
  return {token, sure};
}

// Writes the result of sample `s`; whether it is not proven.
inline bool choose_candidate(const std::vector<Record>& records, const Request& request, int64_t position,
                             int64_t budget, int64_t s, const Results& results) {
  int64_t wanted = results.wanted(request);
  float maximum = -INFINITE, sum = 0;
  for (const Record& record : records) {
    if (record.head->maximum != record.head->maximum) return results.fill(s, NOT_FINITE, wanted), false;
    maximum = std::max(maximum, record.head->maximum);
  }
  results.fill(s, 0, 0);
  std::vector<Candidate> tops;
  Choice choice{records[0].head->best, true};
  for (const Record& record : records) {
    sum += record.head->sum * exponential(record.head->maximum - maximum);
    choice.token = std::min(choice.token, record.head->best);
    tops.insert(tops.end(), record.tops, record.tops + std::min(record.head->ids, results.top()));
  }
  float log_sum = std::log(sum);
  if (filters(request)) choice = draw_candidates(records, request, position, budget);
  if (choice.sure) {
    data<int32_t>(results.chosen)[s] = choice.token.id;
    data<float>(results.logprobs)[s] = choice.token.raw - maximum - log_sum;
  }
  std::sort(tops.begin(), tops.end());
  for (int64_t i = 0; i < std::min<int64_t>(wanted, tops.size()); i++) {
    results.tops(s)[i] = tops[i].id;
    results.top_logprobs_of(s)[i] = tops[i].value - maximum - log_sum;
  }
  return !choice.sure;
}

}  // namespace sampling

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> candidates(
    const Tensor& logits, const Tensor& token_counts, const Tensor& request_state, const Tensor& request_ints,
    const Tensor& request_floats, const Tensor& tokens, const Tensor& token_rows, const Tensor& slots,
    const Tensor& starts, const Tensor& lengths, const Tensor& sample_rows, const Tensor& emits, int64_t stop_ids,
    int64_t bias_ids, int64_t top, int64_t drafts, const Tensor& peers, Tensor exchange, Tensor step_counter,
    const Tensor& rank, int64_t budget, int64_t call, int64_t calls, int64_t world, int64_t vocab) {
  using sampling::Record;
  int64_t samples = logits.size(0), columns = logits.size(1), words = Record::words(top, budget);
  int64_t first = std::min(data<int32_t>(rank)[0] * columns, vocab), count = std::min(columns, vocab - first);
  STD_TORCH_CHECK(token_counts.size(1) == vocab, "token counts and logits differ in vocabulary");
  sampling::Step step{token_counts, request_state, request_ints, request_floats, tokens,   token_rows, slots,
                      starts,       lengths,       sample_rows,  stop_ids,       bias_ids, drafts};
  Exchange ranks(peers, exchange, step_counter, rank, call, calls, world);
  double* own = ranks.part<double>(samples * words);
  const int32_t* emit = data<int32_t>(emits);
  for (int64_t s = 0; s < samples; s++)
    if (emit[s])
      sampling::fill_record(Record(own, s, top, budget), step.request(s, first), data<float>(logits) + s * columns,
                            count, step.position(s), top, budget);
  std::vector<const double*> parts = ranks.publish<double>();
  sampling::Results results = sampling::Results::of(samples, top);
  Tensor unsure = make(ScalarType::Int, {samples});
  int64_t total = 0;
  for (int64_t s = 0; s < samples; s++) {
    std::vector<Record> records;
    for (const double* part : parts)
      if (part && Record(part, s, top, budget).head->ids) records.emplace_back(part, s, top, budget);
    bool open = false;
    if (!emit[s] || records.empty()) results.fill(s, 0, 0);
    else open = sampling::choose_candidate(records, step.request(s), step.position(s), budget, s, results);
    total += data<int32_t>(unsure)[s] = open;
  }
  int64_t* counter = data<int64_t>(step_counter);
  counter[table::WHOLE_STEPS] += total > 0;
  counter[table::WHOLE_SAMPLES] += total;
  if (total) counter[table::LAST_WHOLE] = counter[table::STEPS] + 1;
  return {results.chosen, results.logprobs, results.top_tokens, results.top_logprobs, unsure};
}

}  // namespace inkling
