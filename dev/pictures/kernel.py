"""The diagram of the persistent decode kernel (llmc/cuda/fused): one block, and one layer of a parallel residual in time.

What it shows is told by the head of llmc/cuda/fused/decode.cu.
"""

from __future__ import annotations

from svg import Picture

STAGES = 10


def boxed(picture: Picture, x: float, y: float, width: float, height: float, title: str, lines: tuple[str, ...],
          border: str = "soft") -> None:
    picture.box(x, y, width, height, "box", ' rx="5"')
    picture.box(x, y, width, height, f"{border}l", ' stroke-width="1.5" rx="5"')
    picture.text(x + width / 2, y + 21, title, "b m ink")
    for i, line in enumerate(lines):
        picture.text(x + width / 2, y + 39 + 16 * i, line, "s m soft")


def block(picture: Picture) -> None:
    boxed(picture, 18, 84, 128, 172, "GPU memory", ())
    for y, name, colour in ((116, "weights", "c0"), (182, "K/V cache", "c4")):
        picture.line([(32, y), (132, y), (132, y + 54), (32, y + 54), (32, y)], f"{colour}l", 2)
        picture.text(82, y + 24, name, "m b ink")
        picture.text(82, y + 41, "of this block", "s m soft")

    picture.line([(180, 60), (654, 60), (654, 306), (180, 306), (180, 60)], "softl", 1.5, ' stroke-dasharray="5 4"')
    picture.text(416, 52, "one block, resident on one multiprocessor", "m soft")

    boxed(picture, 196, 112, 134, 92, "producer", ("one thread: copies in", "a fixed order, never", "waits for other blocks"), "c0")
    picture.text(422, 92, "ring in shared memory", "b m ink")
    for i in range(STAGES):
        row, column = divmod(i, 5)
        colour = "c0" if i in (0, 1, 2, 3, 5, 6) else "c4" if i == 4 else "grid"
        picture.box(358 + 26 * column, 104 + 30 * row, 22, 26, colour, ' rx="2"')
    picture.text(422, 184, "weights · keys, values · free", "s m soft")
    picture.text(422, 200, "at most 64 KB in flight", "s m soft")
    boxed(picture, 514, 112, 126, 92, "consumers", ("8 or 10 warps: multiply", "whole rows, add in", "a fixed order"), "c1")
    boxed(picture, 414, 232, 226, 62, "helper", ("one warp: rotates q and k, appends", "to the cache, merges splits"), "c3")

    picture.arrow([(146, 158), (196, 158)], "c0", 2.5)
    picture.arrow([(330, 134), (354, 134)], "c0", 2.5)
    picture.arrow([(490, 134), (514, 134)], "c0", 2.5)
    picture.arrow([(548, 204), (548, 218), (263, 218), (263, 204)], "soft")
    picture.text(330, 233, "stage is free", "s m soft")
    picture.arrow([(590, 232), (590, 204)], "c3", 2)
    picture.text(598, 222, "query", "s soft")

    boxed(picture, 690, 84, 132, 206, "exchange in L2", ("with all other blocks:", "x, q k v, MLP-up,", "attention.", "", "Each value carries a",
                                                     "bit of its layer's", "number: the data is", "its own flag."))
    picture.arrow([(640, 150), (690, 150)], "c1", 2)
    picture.arrow([(690, 174), (640, 174)], "c1", 2)
    picture.arrow([(640, 254), (690, 254)], "c3", 2)
    picture.arrow([(690, 276), (640, 276)], "c3", 2)


PHASES = (("x", 40), ("norms", 58), ("QKV rows", 104), ("MLP-up rows, GELU", 158), ("attention", 96), ("MLP-down rows", 142),
          ("output", 70))


def timeline(picture: Picture) -> None:
    picture.text(18, 344, "One layer in time", "t ink")
    picture.text(168, 344, "(parallel residual, as in Pythia; widths are not to scale)", "s soft")
    left = 110.0
    for y, name in ((358, "producer"), (392, "consumers"), (426, "helper")):
        picture.text(left - 10, y + 19, name, "e b ink")
    picture.box(left, 358, 712, 28, "c0", ' opacity="0.3" rx="3"')
    picture.text(left + 356, 377, "copies without a pause: the rest of this layer, then the next layer, then the next token", "s m ink")
    x, starts = left, {}
    for i, (name, width) in enumerate(PHASES):
        starts[name] = x
        scaled = width * 712 / sum(w for _, w in PHASES)
        picture.box(x, 392, scaled - 2, 28, "c1" if i else "grid", f' opacity="{0.35 if i else 1}" rx="3"')
        picture.text(x + scaled / 2 - 1, 411, name, "s m ink")
        x += scaled
    for name, until, words in (("MLP-up rows, GELU", "attention", "waits for q k v, rotates"),
                               ("MLP-down rows", "output", "merges the splits")):
        picture.box(starts[name], 426, starts[until] - starts[name] - 2, 28, "c3", ' opacity="0.35" rx="3"')
        picture.text((starts[name] + starts[until]) / 2 - 1, 445, words, "s m ink")
    picture.text(left, 476, "Of the four exchanges those of x and half of MLP-up's are exposed; the weights that the ring has stocked cover them.",
                 "s soft")


def kernel() -> Picture:
    picture = Picture(840, 492, "The persistent decode kernel: producer, ring, consumers and helper of one block, and one layer in time")
    picture.text(18, 28, "One launch decodes many tokens", "t ink")
    block(picture)
    timeline(picture)
    return picture
