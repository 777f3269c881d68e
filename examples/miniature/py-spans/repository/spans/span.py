"""A span is half open: it contains its start and not its end."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    start: int
    end: int

    def __post_init__(self):
        if self.end < self.start:
            raise ValueError(f"a span cannot end at {self.end}, before it starts at {self.start}")

    @property
    def length(self):
        return self.end - self.start

    def touches(self, other):
        """Whether the two have a point in common or are next to each other."""
        return self.start <= other.end and other.start <= self.end

    def overlaps(self, other):
        return self.start < other.end and other.start < self.end


def merge(spans):
    """The smallest sorted list of spans that covers the same points."""
    merged = []
    for span in sorted(spans):
        if span.length == 0:
            continue
        if merged and merged[-1].touches(span):
            merged[-1] = Span(merged[-1].start, span.end)
        else:
            merged.append(span)
    return merged


def subtract(whole, spans):
    """The parts of `whole` that no span covers."""
    left = []
    start = whole.start
    for span in merge(spans):
        if not span.overlaps(whole):
            continue
        if span.start > start:
            left.append(Span(start, span.start))
        start = min(span.end, whole.end)
    if start < whole.end:
        left.append(Span(start, whole.end))
    return left
