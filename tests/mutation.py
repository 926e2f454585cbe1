"""Kernels that are changed on purpose: wrong ones, which tests must see, and slow ones, which must stay right."""

from __future__ import annotations

from dataclasses import dataclass

from cuflash.render import Source


@dataclass(frozen=True)
class Mutation:
    """A change of a kernel's text: `old` becomes `new` in `header`, or in the kernel's own text ("")."""

    header: str
    old: str
    new: str

    def apply(self, source: Source) -> Source:
        text = source.headers[self.header] if self.header else source.text
        if self.old not in text:  # not by an assertion, which tests take for a fault that was seen
            raise ValueError(f"{self.header or source.symbol} has no {self.old!r}: write the mutation anew")
        text = text.replace(self.old, self.new)
        if not self.header:
            return source._replace(text=text)
        return source._replace(headers={**source.headers, self.header: text})
