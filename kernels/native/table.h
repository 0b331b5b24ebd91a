// Columns of the request table: `kernels/table.py` says what they mean.
#pragma once
#include <cstdint>

namespace inkling::table {

enum State : int64_t { LENGTH, LAST_TOKEN, GENERATED, FINISH, DRAFTS, STATE_WIDTH = 8 };
enum Ints : int64_t {
  PROMPT_LENGTH,
  MAX_TOKENS,
  MIN_TOKENS,
  TOP_K,
  SEED_LOW,
  SEED_HIGH,
  TOP_LOGPROBS,
  DRAFT_LIMIT,
  FORCE_ACCEPT,
  INT_HEADER = 12
};
enum Floats : int64_t { TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, REPETITION, FLOAT_HEADER = 8 };
enum Admit : int64_t { ADMIT_SLOT, ADMIT_LENGTH, ADMIT_GENERATED, ADMIT_HEADER = 4 };
enum Counter : int64_t { STEPS, WHOLE_STEPS, WHOLE_SAMPLES, LAST_WHOLE };
enum Flags : int32_t { SAMPLE = 1, FROM_TABLE = 2 };
enum Finish : int32_t { NONE, STOP, MAX_LENGTH, NON_FINITE };

constexpr int32_t PROMPT_SEEN = 1 << 30;
constexpr int64_t RESULT_HEADER = 5;

}  // namespace inkling::table
