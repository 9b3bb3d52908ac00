"""A small writer of SVG pictures: panels with axes, bars, lines and boxes, in colours for light and dark pages.

The same calls give the same bytes on every machine. A picture brings its own background, so it stays readable where the
page and the reader's system disagree about dark and light.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

LIGHT = {"page": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "grid": "#d1d9e0", "box": "#f3f5f8",
         "c0": "#0b62d6", "c1": "#b35900", "c2": "#6e7781", "c3": "#8250df", "c4": "#1a7f37"}
DARK = {"page": "#0d1117", "ink": "#e6edf3", "soft": "#9198a1", "grid": "#30363d", "box": "#171d26",
        "c0": "#58a6ff", "c1": "#f0a04b", "c2": "#8b949e", "c3": "#bc8cff", "c4": "#56d364"}


def style() -> str:
    def rules(colours: dict[str, str]) -> str:
        return "".join(f".{name}{{fill:{colour}}}.{name}l{{stroke:{colour};fill:none}}" for name, colour in colours.items())
    return (f"text{{font:13px system-ui,'DejaVu Sans',sans-serif}}.t{{font-weight:600;font-size:15px}}.s{{font-size:12px}}"
            f".b{{font-weight:600}}.m{{text-anchor:middle}}.e{{text-anchor:end}}"
            f"{rules(LIGHT)}@media(prefers-color-scheme:dark){{{rules(DARK)}}}")


def number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass
class Picture:
    width: int
    height: int
    title: str  # read aloud in the place of the picture
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, kind: str = "ink") -> None:
        self.parts.append(f'<text x="{number(x)}" y="{number(y)}" class="{kind}">{escape(words, quote=False)}</text>')

    def box(self, x: float, y: float, width: float, height: float, kind: str, more: str = "") -> None:
        self.parts.append(f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}" '
                          f'class="{kind}"{more}/>')

    def line(self, points: list[tuple[float, float]], kind: str, width: float = 1, more: str = "") -> None:
        path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" class="{kind}" stroke-width="{number(width)}"{more}/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        self.parts.append(f'<circle cx="{number(x)}" cy="{number(y)}" r="3.5" class="{kind}"/>')

    def arrow(self, points: list[tuple[float, float]], kind: str = "soft", width: float = 1.5) -> None:
        """Along the points; the head has the direction of the last piece, which is horizontal or vertical."""
        (x0, y0), (x, y) = points[-2:]
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        self.line([*points[:-1], (x - 5 * dx, y - 5 * dy)], f"{kind}l", width)
        left, right = (x - 8 * dx - 4 * dy, y - 8 * dy - 4 * dx), (x - 8 * dx + 4 * dy, y - 8 * dy + 4 * dx)
        corners = " ".join(f"{number(a)},{number(b)}" for a, b in ((x, y), left, right))
        self.parts.append(f'<polygon points="{corners}" class="{kind}"/>')

    def written(self) -> str:
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
                f'height="{self.height}" role="img">\n<title>{escape(self.title, quote=False)}</title>\n'
                f'<style>{style()}</style>\n<rect width="{self.width}" height="{self.height}" rx="8" class="page"/>\n')
        return head + "\n".join(self.parts) + "\n</svg>\n"


def bars(picture: Picture, at: tuple[float, float], width: float, title: str, note: str,
         rows: list[tuple[str, float, str, str]], most: float, names: float = 110) -> None:
    """Horizontal bars below a title. A row: name, value, what stands behind the bar, colour. `most` fills the width."""
    x, y = at
    picture.text(x, y, title, "t ink")
    picture.text(x, y + 19, note, "s soft")
    for i, (name, value, label, colour) in enumerate(rows):
        top = y + 34 + 29 * i
        picture.text(x + names - 8, top + 15, name, f"e {'b ink' if colour == 'c0' else 'ink'}")
        picture.box(x + names, top, (width - names) * value / most, 21, colour, ' rx="2"')
        picture.text(x + names + (width - names) * value / most + 7, top + 15, label, "b ink" if colour == "c0" else "ink")


@dataclass
class Axes:
    """A panel in which values have places. `across` and `up` map a value to 0 … 1 of the panel."""

    picture: Picture
    x: float
    y: float
    width: float
    height: float
    across: tuple[float, float]
    up: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        return (self.x + self.width * (x - self.across[0]) / (self.across[1] - self.across[0]),
                self.y + self.height * (1 - (y - self.up[0]) / (self.up[1] - self.up[0])))

    def frame(self, across: list[tuple[float, str]], up: list[tuple[float, str]], below: str) -> None:
        for value, label in up:
            _, y = self.place(self.across[0], value)
            self.picture.line([(self.x, y), (self.x + self.width, y)], "gridl")
            self.picture.text(self.x - 8, y + 4, label, "s e soft")
        for value, label in across:
            x, _ = self.place(value, self.up[0])
            self.picture.text(x, self.y + self.height + 18, label, "s m soft")
        self.picture.text(self.x + self.width / 2, self.y + self.height + 37, below, "s m soft")

    def curve(self, values: list[tuple[float, float]], colour: str, dots: bool, width: float = 2, more: str = "") -> None:
        points = [self.place(x, y) for x, y in values]
        self.picture.line(points, f"{colour}l", width, more)
        for x, y in points if dots else []:
            self.picture.dot(x, y, colour)
