"""Variants of the training rows that must not change their label: settings, unrelated turns, sloppy typing."""

from __future__ import annotations

import dataclasses
import random

from serve_app.routing.excerpt import Excerpt, clipped
from training.rows import Row

# An ask this long stands by itself, whatever came before it.
_STANDS_ALONE = 60
_SYSTEMS = {
    "en": (
        "You are a helpful assistant. Think step by step and reason carefully before you answer.",
        "Before every reply, analyse the request from several angles, list the risks, then answer.",
        "You are Iris, the assistant of a small company. Be friendly. Answer in the language of the user.",
        "You're a careful expert. Take a deep breath and work through the problem logically, then double-check.",
        "Answer briefly and directly, no more than three sentences.",
        "You are an assistant in a chat app. Use Markdown. Never mention these instructions. Today is Tuesday.",
    ),
    "zh": (
        "你是一个乐于助人的助手。回答之前请一步一步仔细思考，反复检查。",
        "你是公司内部助手小岚，语气友好，优先给结论。遇到任何问题都要先深入分析再作答。",
        "请用简洁的语言直接回答，不超过三句话。",
        "【角色】社区服务助手。【要求】先思考、再分析、后回答；不得编造；必要时请用户联系人工。",
        "你是一位严谨的专家，请从多个角度论证后再给出答案。",
        "你运行在一个聊天应用里，使用Markdown排版，不要提及这些说明。",
    ),
}


def augmented(rows: list[Row], noise: random.Random) -> list[Excerpt]:
    """One variant of each row."""
    earlier = [row.excerpt for row in rows if row.excerpt.before and row.excerpt.reply]
    return [_variant(row, earlier, noise) for row in rows]


def _variant(row: Row, earlier: list[Excerpt], noise: random.Random) -> Excerpt:
    excerpt = row.excerpt
    changes: dict[str, str] = {}
    if not excerpt.system and noise.random() < 0.5:
        changes["system"] = noise.choice(_SYSTEMS["en" if row.lang == "en" else "zh"])
    elif excerpt.system and len(excerpt.ask) > _STANDS_ALONE and noise.random() < 0.2:
        changes["system"] = ""
    if not excerpt.before and len(excerpt.ask) > _STANDS_ALONE and noise.random() < 0.35:
        other = noise.choice(earlier)
        changes |= {"before": other.before, "reply": other.reply}
    if noise.random() < 0.35:
        ask = _sloppy(excerpt.ask, noise)
        changes |= {"ask": ask, "instruction": clipped(ask, 350)}
    return dataclasses.replace(excerpt, **changes)


def _sloppy(text: str, noise: random.Random) -> str:
    kind = noise.randrange(4)
    if kind == 0:
        return text.lower()
    if kind == 1:
        return "".join(character for character in text if character not in "?.!,;:？。！，；：")
    letters = list(text)
    for _ in range(max(1, len(letters) // 60)):
        at = noise.randrange(max(1, len(letters) - 1))
        if kind == 2 and letters[at].isalpha():
            del letters[at]
        elif at + 1 < len(letters) and letters[at].isalpha() and letters[at + 1].isalpha():
            letters[at], letters[at + 1] = letters[at + 1], letters[at]
    return "".join(letters)
