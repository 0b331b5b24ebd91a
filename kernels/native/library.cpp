// All native CPU kernels in one library; each op's folder holds its own.
#include "../attention_decode/native.h"
#include "../attention_extend/native.h"
#include "../attention_verify/native.h"
#include "../attention_prologue/native.h"
#include "../boundary/native.h"
#include "../commit/native.h"
#include "../draft_commit/native.h"
#include "../draft_gather/native.h"
#include "../draft_input/native.h"
#include "../draft_metadata/native.h"
#include "../draft_sample/native.h"
#include "../embed_norm/native.h"
#include "../experts/native.h"
#include "../gather_logits/native.h"
#include "../head/native.h"
#include "../linear/native.h"
#include "../moe/native.h"
#include "../rmsnorm/native.h"
#include "../router/native.h"
#include "../sample/native.h"
#include "../step_metadata/native.h"
#include "../swiglu/native.h"

STABLE_TORCH_LIBRARY_IMPL(inkling, CPU, m) {
  m.impl("attention_decode", TORCH_BOX(&inkling::attention_decode));
  m.impl("attention_extend", TORCH_BOX(&inkling::attention_extend));
  m.impl("attention_verify", TORCH_BOX(&inkling::attention_verify));
  m.impl("attention_prologue", TORCH_BOX(&inkling::attention_prologue));
  m.impl("boundary", TORCH_BOX(&inkling::boundary));
  m.impl("commit", TORCH_BOX(&inkling::commit));
  m.impl("draft_commit", TORCH_BOX(&inkling::draft_commit));
  m.impl("draft_gather", TORCH_BOX(&inkling::draft_gather));
  m.impl("draft_input", TORCH_BOX(&inkling::draft_input));
  m.impl("draft_metadata", TORCH_BOX(&inkling::draft_metadata));
  m.impl("draft_sample", TORCH_BOX(&inkling::draft_sample));
  m.impl("embed_norm", TORCH_BOX(&inkling::embed_norm));
  m.impl("experts", TORCH_BOX(&inkling::experts));
  m.impl("gather_logits", TORCH_BOX(&inkling::gather_logits));
  m.impl("head", TORCH_BOX(&inkling::head));
  m.impl("linear", TORCH_BOX(&inkling::linear));
  m.impl("moe", TORCH_BOX(&inkling::moe));
  m.impl("rmsnorm", TORCH_BOX(&inkling::rmsnorm));
  m.impl("router", TORCH_BOX(&inkling::router));
  m.impl("sample", TORCH_BOX(&inkling::sample));
  m.impl("step_metadata", TORCH_BOX(&inkling::step_metadata));
  m.impl("swiglu", TORCH_BOX(&inkling::swiglu));
}
