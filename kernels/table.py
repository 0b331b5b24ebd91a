"""Columns of the request table, shared by host, references and native kernels.

The table is one line a slot (line 0 inert). Each column has one owner: `request_state` is written
by the device (admission lines initialise it in stream order), `request_ints` and `request_floats`
by the host, through the same admission lines.
"""

from enum import IntEnum
from typing import Final

# request_state [slots, STATE_WIDTH] int32, device-owned
LENGTH: Final = 0  # tokens whose state is in the pools
LAST_TOKEN: Final = 1  # sampled, not yet processed
GENERATED: Final = 2  # sampled tokens so far
FINISH: Final = 3  # a Finish code; non-zero makes the row inert
DRAFTS: Final = 4  # valid drafts: guesses of the tokens behind LAST_TOKEN, in draft_tokens
STATE_WIDTH: Final = 8

# request_ints [slots, INT_HEADER + stop_ids + bias_ids] int32, host-owned
PROMPT_LENGTH: Final = 0
MAX_TOKENS: Final = 1
MIN_TOKENS: Final = 2
TOP_K: Final = 3  # 0 = off
SEED_LOW: Final = 4
SEED_HIGH: Final = 5
TOP_LOGPROBS: Final = 6  # most likely tokens that are wanted beside each sampled one
DRAFT_LIMIT: Final = 7  # most drafts a round; 0 = none
FORCE_ACCEPT: Final = 8  # 0 = off, else 1 + low + 16 * high: drafts accepted in even, odd rounds
INT_HEADER: Final = (
    12  # lines are copied by fours; then the stop ids, then the ids of the logit bias
)

# request_floats [slots, FLOAT_HEADER + bias_ids] float32, host-owned
TEMPERATURE: Final = 0  # 0 = greedy
TOP_P: Final = 1  # 1 = off
MIN_P: Final = 2  # 0 = off
PRESENCE: Final = 3
FREQUENCY: Final = 4
REPETITION: Final = 5  # 1 = off
FLOAT_HEADER: Final = 8  # then the values of the logit bias

INERT_TOKEN: Final = 2**31 - 1  # fills unused stop ids: compared, never used as an index

# admit_ints lines: slot, initial length, initial generated, 0, then a line of request_ints
ADMIT_SLOT: Final = 0
ADMIT_LENGTH: Final = 1
ADMIT_GENERATED: Final = 2
ADMIT_HEADER: Final = 4

# page_updates lines: table, slot, index, page
FULL_TABLE: Final = 0
WINDOW_TABLE: Final = 1

# row_flags bits
SAMPLE: Final = 1  # the row's last token is the end of what is known: sample after it
FROM_TABLE: Final = 2  # the row's one token is LAST_TOKEN, not an entry of token_ids

# token_counts [slots, real_vocab] int32: times sampled, plus PROMPT_SEEN if in the prompt
PROMPT_SEEN: Final = 1 << 30

# step_counter [4] int64
STEPS: Final = 0  # steps so far
WHOLE_STEPS: Final = 1  # those in which the ranks gathered whole logits
WHOLE_SAMPLES: Final = 2  # samples drawn from whole logits
LAST_WHOLE: Final = 3  # the last of WHOLE_STEPS, as what STEPS was after it

# results_int lines: slot, emitted tokens, finish, new length, drafts verified; then the tokens, then
# the top tokens of each. results_float lines: the logprobs, then the top logprobs of each
RESULT_SLOT: Final = 0
RESULT_COUNT: Final = 1
RESULT_FINISH: Final = 2
RESULT_LENGTH: Final = 3
RESULT_DRAFTED: Final = 4
RESULT_HEADER: Final = 5


class Finish(IntEnum):
    """Why the device made a row inert."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    NON_FINITE = 3
