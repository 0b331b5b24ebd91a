# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""A thread's wait for 16 bytes that another rank pushes, in assembly (see `_exchange_triton.py`).

Triton's own loops leave together: each poll would be summed over the program, at two barriers. Here a
thread leaves once none of its elements has zero bits, whatever the others see. Every TRIES polls it looks
at the error word and the clock. When time is over it notes the rank, unless one is noted already, and has
zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_engine.kernels._exchange import ERROR, LIMIT, LIMIT_MS, WORD

TRIES = tl.constexpr(64)  # polls between two looks at the clock; a power of 2
VECTOR = tl.constexpr(16)  # bytes that a thread waits for


def _wait(missing: str) -> tl.constexpr:
    """Four words at $4 as $0 to $3; the own block is at $5, the rank is $6. `missing` sets p if an element of
    them has zero bits. Without an address there is nothing to wait for. All on one line: Inductor does
    not escape what it writes into a program."""
    error, limit = f"[$5 + {WORD * ERROR}]", f"[$5 + {WORD * LIMIT}]"
    text = f"""{{
    .reg .pred p;
    .reg .b32 polls, t, u;
    .reg .b64 begin, now, word;
    mov.u32 polls, 0;
    mov.u64 begin, 0;
    setp.eq.u64 p, $4, 0;
    @p bra nothing;
poll:
    ld.relaxed.sys.global.v4.b32 {{$0, $1, $2, $3}}, [$4];
    {missing}
    @!p bra done;
    add.u32 polls, polls, 1;
    and.b32 t, polls, {TRIES.value - 1};
    setp.ne.u32 p, t, 0;
    @p bra poll;
    mov.u64 now, %globaltimer;
    setp.eq.u32 p, polls, {TRIES.value};
    @p mov.u64 begin, now;
    ld.relaxed.sys.global.b64 word, {error};
    setp.ne.u64 p, word, 0;
    @p bra nothing;
    ld.relaxed.sys.global.b64 word, {limit};
    setp.eq.u64 p, word, 0;
    @p mov.u64 word, {LIMIT_MS};
    mul.lo.u64 word, word, 1000000;
    sub.u64 now, now, begin;
    setp.le.u64 p, now, word;
    @p bra poll;
    cvt.s64.s32 now, $6;
    add.u64 now, now, 1;
    mov.u64 word, 0;
    atom.relaxed.sys.global.cas.b64 word, {error}, word, now;
nothing:
    mov.b32 $0, 0;
    mov.b32 $1, 0;
    mov.b32 $2, 0;
    mov.b32 $3, 0;
done:
}}"""
    return tl.constexpr(" ".join(text.split()))


def _zero_halves() -> str:
    """A half-word h is zero in some word w: the borrow of w - 0x00010001 shows in a bit that w lacks."""
    lines = []
    for i in range(4):
        lines += [f"sub.u32 u, ${i}, 0x00010001;", f"lop3.b32 u, u, ${i}, 0x80008000, 0x20;"]
        lines.append("or.b32 t, t, u;" if i else "mov.b32 t, u;")
    return " ".join([*lines, "setp.ne.u32 p, t, 0;"])


_WAIT_HALVES = _wait(_zero_halves())
_WAIT_WORDS = _wait("min.u32 t, $0, $1; min.u32 u, $2, $3; min.u32 t, t, u; setp.eq.u32 p, t, 0;")
_LAYOUT = tl.constexpr("=&r,=&r,=&r,=&r,l,l,r")


@triton.jit
def _low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def awaited(exchange, slot, width, r, BLOCK: tl.constexpr):
    """fp32 of the BLOCK elements, bf16 or fp32, at the pointer `slot`, of which rank r pushes the first
    `width`, a multiple of a thread's; zeros for those of a thread that have not come in time."""
    SIZE: tl.constexpr = slot.dtype.element_ty.primitive_bitwidth // 8
    EACH: tl.constexpr = VECTOR // SIZE
    lane = tl.arange(0, BLOCK // EACH) * EACH
    at = tl.where(lane < width, (slot + lane).to(tl.int64), 0)
    own, rank = tl.zeros_like(at) + exchange.to(tl.int64), tl.zeros_like(lane) + r
    TEXT: tl.constexpr = _WAIT_HALVES if SIZE == 2 else _WAIT_WORDS
    a, b, c, d = tl.inline_asm_elementwise(
        TEXT, _LAYOUT, [at, own, rank], dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip
    if SIZE == 2:
        even = tl.join(tl.join(_low(a), _low(c)), tl.join(_low(b), _low(d)))
        odd = tl.join(tl.join(_high(a), _high(c)), tl.join(_high(b), _high(d)))
        return tl.reshape(tl.join(even, odd), (BLOCK,))
    else:
        found = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.float32, bitcast=True)
        return tl.reshape(found, (BLOCK,))
