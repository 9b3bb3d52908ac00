"""A counter-based random source: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

The standard library's generator is not used because its choice and shuffle algorithms may change between Python versions.
"""

from typing import Sequence, TypeVar

Item = TypeVar("Item")

_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85


def philox_block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten Philox rounds over one 128-bit counter: four independent 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product_0 = _MULTIPLIER_0 * c0
        product_1 = _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0 = (k0 + _WEYL_0) & _MASK
        k1 = (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


class RandomSource:
    """The stream number `stream` of the seed `seed`; streams never overlap."""

    def __init__(self, seed: int, stream: int) -> None:
        self._key = (seed & _MASK, (seed >> 32) & _MASK)
        self._stream = (stream & _MASK, (stream >> 32) & _MASK)
        self._block = 0
        self._words: list[int] = []

    def _word(self) -> int:
        if not self._words:
            counter = (self._block & _MASK, self._block >> 32, *self._stream)
            self._words = list(philox_block(counter, self._key))
            self._block += 1
        return self._words.pop()

    def below(self, bound: int) -> int:
        """An integer in [0, bound); the bias of the multiply-shift is below 2^-24 for the small bounds used here."""
        return (self._word() * bound) >> 32

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, items: Sequence[Item]) -> Item:
        return items[self.below(len(items))]

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """`count` different items in random order."""
        pool = list(items)
        return [pool.pop(self.below(len(pool))) for _ in range(count)]
