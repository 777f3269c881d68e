"""Content of the simulated conversations: a coding agent with two tools, and text that is awkward to tokenize.

Everything is drawn from a `random.Random`, so that a conversation is a function of its seed.
"""

from __future__ import annotations

from random import Random
from typing import Any

from towline.conversation import Tool

SYSTEM = "You are a careful coding agent. Work in small steps and check the result of each."
REVIEWER = "You review patches. Answer in one short paragraph."

BASH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {
            "type": "object",
            "properties": {
                "command": {"type": "string"},
                "timeout": {"type": "integer"},
                "background": {"type": "boolean"},
            },
            "required": ["command"],
        },
    },
}
EDIT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": "Replace text in a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "options": {"type": "object"},
                "lines": {"type": "array", "items": {"type": "integer"}},
            },
            "required": ["path"],
        },
    },
}
SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the documentation.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
TOOLS = (BASH, EDIT)

_WORDS = (
    "the", "parser", "keeps", "state", "between", "calls", "cache", "naïve", "façade", "résumé", "índice",
    "файл", "設定", "を", "読む", "測試", "🙂", "tokenization", "uncharacteristically", "HTTPServer",
    "snake_case_name", "x_1", "3.14159", "0x1F", "2026-11-15", "don't", "re-entrant", "O(n log n)",
    "src/app.py", "--verbose", "&&", "≥",
)  # fmt: skip
_COMMANDS = (
    "ls -la src",
    "grep -rn 'näme' src/ | head -5",
    'python -c "print(1 + 1)"',
    "sed -n '1,20p' README.md",
    "git diff --stat",
    "cat  tests/test_a.py",
    "printf 'a\\tb\\n'",
)


def sentence(random: Random, least: int = 2, most: int = 5) -> str:
    """Random words with the capital letter and punctuation of a sentence."""
    words = " ".join(random.choices(_WORDS, k=random.randint(least, most)))
    return words[0].upper() + words[1:] + random.choice((".", "!", "…", "."))


def output(random: Random) -> str:
    """The output of a command."""
    lines = [f"{random.randint(1, 99)}:\t{sentence(random, 1, 4)}" for _ in range(random.randint(1, 3))]
    return "\n".join(lines)


def call(random: Random) -> tuple[str, dict[str, Any]]:
    """A call of one of the tools, with arguments that can be serialised in several ways."""
    if random.random() < 0.6:
        arguments: dict[str, Any] = {"command": random.choice(_COMMANDS)}
        if random.random() < 0.7:
            arguments["timeout"] = random.randint(1, 600)
        if random.random() < 0.5:
            arguments["background"] = random.random() < 0.5
        return "bash", arguments
    return "edit_file", {
        "path": f"src/{random.choice(('ä', 'b', 'main'))}.py",
        "options": {"mode": "ré", "depth": random.randint(1, 9), "dry": False},
        "lines": random.sample(range(100), 2),
    }


def neutral(declaration: dict[str, Any]) -> Tool:
    """A wire tool declaration as a neutral `Tool`."""
    function = declaration["function"]
    return Tool(function["name"], function["description"], function["parameters"])
