# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
"""A thread's wait for vectors of 16 bytes that another rank pushes, in assembly (see `_exchange_triton.py`).

Triton's own loops leave together: each poll would be summed over the program, at two barriers. Here a
thread leaves once none of its elements has zero bits, whatever the others see. Every TRIES polls it looks
at the error word and the clock. When time is over it notes the rank, unless one is noted already, and has
zeros. What a warp has seen it zeroes for the next call. Many threads that poll delay what they wait for:
with a `scout` a warp's last thread polls first, and the others when that has seen its vectors.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inkling_engine.kernels._exchange import ERROR, LIMIT, LIMIT_MS, WORD

TRIES = tl.constexpr(64)  # polls between two looks at the clock; a power of 2
SCOUTED = 4096  # polls of a scout, some milliseconds: then all poll, and look at the clock
VECTOR = tl.constexpr(16)  # bytes
_ONES = "0x00010001"


def _test(size: int, word: str) -> str:
    """Make t zero (words), or not zero (half-words), if an element of `word` has zero bits."""
    if size == 4:
        return f"min.u32 t, t, {word};"
    # the borrow of a half-word that is zero is a bit that the half-word lacks
    return f"sub.u32 u, {word}, {_ONES}; lop3.b32 u, u, {word}, 0x80008000, 0x20; or.b32 t, t, u;"


def _look(words: list[list[str]], outputs: int, size: int) -> list[str]:
    """Assembly that loads the vectors `words` from the addresses after `outputs` operands; p: not all there."""
    every = [word for vector in words for word in vector]
    return [
        *(
            f"@w{v} ld.relaxed.sys.global.v4.b32 {{{', '.join(vector)}}}, [${outputs + v}];"
            for v, vector in enumerate(words)
        ),
        f"mov.u32 t, {0 if size == 2 else 0xFFFFFFFF};",
        *(_test(size, word) for word in every),
        f"setp.{'ne' if size == 2 else 'eq'}.u32 p, t, 0;",
    ]


def _wait(size: int, vectors: int, scout: bool) -> tl.constexpr:
    """Assembly that waits for `vectors` vectors of elements of `size` bytes.

    Operands are as many of each: four words, an address, or 0 if nothing is to come, the own block's, the
    rank. All is on one line, for Inductor does not escape what it writes into programs.
    """
    outputs, (block, rank) = 4 * vectors, (f"${i * vectors}" for i in (5, 6))
    words = [[f"${i * vectors + v}" for i in range(4)] for v in range(vectors)]
    every = [word for vector in words for word in vector]
    error, limit = f"[{block} + {WORD * ERROR}]", f"[{block} + {WORD * LIMIT}]"
    look = _look(words, outputs, size)
    ahead = [
        "mov.u32 t, %laneid; setp.ne.u32 p, t, 31; @p bra scouted;",
        "scout:",
        *look,
        "@!p bra scouted;",
        f"add.u32 polls, polls, 1; setp.lt.u32 p, polls, {SCOUTED}; @p bra scout;",
        "scouted: bar.warp.sync 0xffffffff; mov.u32 polls, 0;",
    ]
    lines = [
        "{ .reg .pred p, w<2>; .reg .b32 polls, t, u; .reg .b64 begin, now, word;",
        "mov.u32 polls, 0;",
        *(f"setp.ne.u64 w{v}, ${outputs + v}, 0;" for v in range(vectors)),
        *(f"mov.b32 {word}, {_ONES};" for word in every),
        *(ahead if scout else ()),
        "poll:",
        *look,
        "@!p bra done;",
        f"add.u32 polls, polls, 1; and.b32 t, polls, {TRIES.value - 1};",
        "setp.ne.u32 p, t, 0; @p bra poll;",
        f"mov.u64 now, %globaltimer; setp.eq.u32 p, polls, {TRIES.value}; @p mov.u64 begin, now;",
        f"ld.relaxed.sys.global.b64 word, {error}; setp.ne.u64 p, word, 0; @p bra late;",
        f"ld.relaxed.sys.global.b64 word, {limit};",
        f"setp.eq.u64 p, word, 0; @p mov.u64 word, {LIMIT_MS};",
        "mul.lo.u64 word, word, 1000000; sub.u64 now, now, begin;",
        "setp.le.u64 p, now, word; @p bra poll;",
        f"cvt.s64.s32 now, {rank}; add.u64 now, now, 1; mov.u64 word, 0;",
        f"atom.relaxed.sys.global.cas.b64 word, {error}, word, now;",
        "late:",
        *(f"mov.b32 {word}, 0;" for word in every),
        "done:",
        "bar.warp.sync 0xffffffff; mov.u32 t, 0;",  # threads of a warp may have the same vector
        *(f"@w{v} st.global.v4.b32 [${outputs + v}], {{t, t, t, t}};" for v in range(vectors)),
        *(f"@!w{v} mov.b32 {word}, 0;" for v in range(vectors) for word in words[v]),
        "}",
    ]
    return tl.constexpr(" ".join(lines))


_HALVES, _WORDS = _wait(2, 1, False), _wait(4, 1, False)
_PAIRS_OF_HALVES, _PAIRS_OF_WORDS = _wait(2, 2, False), _wait(4, 2, False)
_SCOUTED_HALVES, _SCOUTED_WORDS = _wait(2, 1, True), _wait(4, 1, True)
_OPERANDS = tl.constexpr("=&r," * 4 + "l,l,r")
_PAIRS_OF_OPERANDS = tl.constexpr("=&r," * 8 + "l,l,l,l,r,r")


@triton.jit
def _low(word):
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(word):
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def awaited(
    exchange, slot, width, r, BLOCK: tl.constexpr, PAIRS: tl.constexpr, SCOUT: tl.constexpr
):
    """fp32 of the BLOCK elements, bf16 or fp32, at the pointer `slot`, of which rank r pushes the first
    `width`, which are whole vectors; zeros for those of a thread that have not come in time. A program
    has no more threads than vectors, or is one warp; with PAIRS a thread polls two at once."""
    SIZE: tl.constexpr = slot.dtype.element_ty.primitive_bitwidth // 8
    EACH: tl.constexpr = VECTOR // SIZE
    lane = tl.arange(0, BLOCK // EACH) * EACH
    at = tl.where(lane < width, (slot + lane).to(tl.int64), 0)
    block, rank = tl.zeros_like(at) + exchange.to(tl.int64), tl.zeros_like(lane) + r
    tl.static_assert(not (PAIRS and SCOUT))
    ONE: tl.constexpr = _HALVES if SIZE == 2 else _WORDS
    TWO: tl.constexpr = _PAIRS_OF_HALVES if SIZE == 2 else _PAIRS_OF_WORDS
    SCOUTED_ONE: tl.constexpr = _SCOUTED_HALVES if SIZE == 2 else _SCOUTED_WORDS
    a, b, c, d = tl.inline_asm_elementwise(
        TWO if PAIRS else SCOUTED_ONE if SCOUT else ONE,
        _PAIRS_OF_OPERANDS if PAIRS else _OPERANDS, [at, block, rank],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=2 if PAIRS else 1,
    )  # fmt: skip
    if SIZE == 2:
        even = tl.join(tl.join(_low(a), _low(c)), tl.join(_low(b), _low(d)))
        odd = tl.join(tl.join(_high(a), _high(c)), tl.join(_high(b), _high(d)))
        return tl.reshape(tl.join(even, odd), (BLOCK,))
    else:
        found = tl.join(tl.join(a, c), tl.join(b, d)).to(tl.float32, bitcast=True)
        return tl.reshape(found, (BLOCK,))
