"""All ops, in the order in which a step meets them: generic tests and checks walk this tuple."""

from typing import Final

from inkling_engine.kernels._op import Op
from inkling_engine.kernels.attention_decode import attention_decode
from inkling_engine.kernels.attention_extend import attention_extend
from inkling_engine.kernels.attention_prologue import attention_prologue
from inkling_engine.kernels.attention_verify import attention_verify
from inkling_engine.kernels.boundary import boundary
from inkling_engine.kernels.candidates import candidates
from inkling_engine.kernels.commit import commit
from inkling_engine.kernels.draft_candidates import draft_candidates
from inkling_engine.kernels.draft_commit import draft_commit
from inkling_engine.kernels.draft_gather import draft_gather
from inkling_engine.kernels.draft_input import draft_input
from inkling_engine.kernels.draft_metadata import draft_metadata
from inkling_engine.kernels.draft_sample import draft_sample
from inkling_engine.kernels.embed_norm import embed_norm
from inkling_engine.kernels.experts import experts
from inkling_engine.kernels.gather_logits import gather_logits
from inkling_engine.kernels.head import head
from inkling_engine.kernels.linear import linear
from inkling_engine.kernels.moe import moe
from inkling_engine.kernels.resample import resample
from inkling_engine.kernels.rmsnorm import rmsnorm
from inkling_engine.kernels.router import router
from inkling_engine.kernels.sample import sample
from inkling_engine.kernels.step_metadata import step_metadata
from inkling_engine.kernels.swiglu import swiglu

OPS: Final[tuple[Op, ...]] = (
    step_metadata,
    embed_norm,
    rmsnorm,
    linear,
    swiglu,
    attention_prologue,
    attention_decode,
    attention_extend,
    attention_verify,
    router,
    experts,
    moe,
    boundary,
    head,
    sample,
    candidates,
    gather_logits,
    resample,
    commit,
    draft_metadata,
    draft_gather,
    draft_input,
    draft_sample,
    draft_candidates,
    draft_commit,
)
