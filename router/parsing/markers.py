"""Marks in text that comes in pieces."""


def unfinished(text: str, mark: str) -> int:
    """Where the longest end of ``text`` that is a proper beginning of ``mark`` starts, or its length."""
    start = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while start >= 0:
        if mark.startswith(text[start:]):
            return start
        start = text.find(mark[0], start + 1)
    return len(text)
