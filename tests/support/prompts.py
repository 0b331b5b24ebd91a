"""Prompts of chosen lengths: source text of Python's standard library under the tiny tokenizer."""

from __future__ import annotations

import argparse
import ast
import calendar
import dataclasses
import heapq
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from inkling_engine.compile.models.inkling.shape import TINY

MODULES = (argparse, ast, calendar, dataclasses, heapq, subprocess, tarfile)
SKIPPED = 400  # characters at the start of a file, where licences and docstrings are alike


def python_prompts(lengths: Sequence[int]) -> list[list[int]]:
    """One prompt of each length in tokens, cut from different files and places."""
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    texts = [Path(str(module.__file__)).read_text() for module in MODULES]
    prompts = []
    for i, length in enumerate(lengths):
        text = texts[i % len(texts)]
        start = SKIPPED + 997 * i % 4000
        ids = tokenizer.encode(
            text[start : start + 12 * length + 100], add_special_tokens=False
        ).ids
        assert len(ids) >= length, f"{MODULES[i % len(texts)].__name__} is too short"
        prompts.append(ids[:length])
    return prompts
