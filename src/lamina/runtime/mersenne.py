"""Moves torch's CPU generator past random numbers without drawing them.

`torch.Generator` can be seeded and its state set, not moved on: `MT19937.jumped` of NumPy goes 2**128 outputs, and
`random_raw(n, output=False)` takes nearly as long as drawing. Here the Mersenne twister jumps any number of outputs in
a few milliseconds.

One step of the twister is a linear map T over GF(2), and p(T) = 0 for its characteristic polynomial p, of degree
19937. So T**n = q(T) with q = t**n mod p, and the word n places ahead is the exclusive or of those words j places ahead
for which q has t**j: some ten thousand, all within the next 33 blocks.

Sources: Matsumoto and Nishimura, "Mersenne Twister" (1998), where p is given in closed form; Haramoto, Matsumoto,
Nishimura, Panneton and L'Ecuyer, "Efficient Jump Ahead for F2-Linear Random Number Generators" (2008).
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt
import torch

Words = npt.NDArray[np.uint32]

BLOCK = 624  # words of state, made at once
_MIDDLE = 397
_TWIST = 0x9908B0DF
_DEGREE = 19937
_BLOCKS_READ = 33
_LENGTH = _BLOCKS_READ * BLOCK  # words that a jump reads: at least 19937 + 624

# `at::CPUGeneratorImplState`: the seed (8 bytes), left, seeded (4 each), next (8), then the words, each in 8 bytes.
_STATE_BYTES = 5056
_LEFT, _NEXT, _WORDS = 8, 16, 24

_GROUP = 5  # coefficients taken at a time: all 32 sums of 5 neighbouring words are made first, and then looked up
_AT_ONCE = 512  # windows copied together, 1.3 MB


def advance(state: torch.Tensor, outputs: int) -> torch.Tensor:
    """The generator state (uint8, 1-D) that follows `state` after `outputs` 32-bit numbers were taken."""
    assert state.numel() == _STATE_BYTES, state.numel()
    after = state.clone()
    raw = after.numpy()
    words = raw[_WORDS : _WORDS + 8 * BLOCK].view(np.uint64)
    taken = 625 - int(raw[_LEFT : _LEFT + 4].view(np.int32)[0])  # of the present block; all 624 right after a seed
    blocks, place = divmod(taken + outputs - 1, BLOCK)
    place += 1
    if outputs and blocks:
        words[:] = _later_block(words.astype(np.uint32), blocks, outputs // BLOCK - 1)
    if outputs:
        raw[_LEFT : _LEFT + 4].view(np.int32)[0] = 625 - place
        raw[_NEXT : _NEXT + 8].view(np.uint64)[0] = place
    return after


def is_plain(state: torch.Tensor) -> bool:
    """Whether this is a state as known here, without a normal number kept for the next draw."""
    if state.numel() != _STATE_BYTES or bool(state[_WORDS + 8 * BLOCK :].any()):
        return False
    raw = state.numpy()
    left, following = int(raw[_LEFT : _LEFT + 4].view(np.int32)[0]), int(raw[_NEXT:_WORDS].view(np.uint64)[0])
    return 1 <= left <= BLOCK and (following == 625 - left or (left == 1 and following == 0))


def digest(state: torch.Tensor) -> bytes:
    """Stands for a generator state that will be compared."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def _later_block(words: Words, blocks: int, jump: int) -> Words:
    """The words `blocks` blocks on, by a jump of `jump` blocks (one polynomial for all draws of a size) and steps.

    At least one step follows a jump: of the first word only the highest bit is state, the others come out wrong.
    """
    if jump > _BLOCKS_READ:
        words, blocks = _jumped(words, jump), blocks - jump
    return _continued(words, (blocks + 1) * BLOCK)[-BLOCK:]


def _continued(words: Words, length: int) -> Words:
    """The sequence of the twister from `words` on, in strides as long as nothing read is made in them."""
    sequence = np.empty(length, dtype=np.uint32)
    sequence[:BLOCK] = words
    stride = BLOCK - _MIDDLE
    for start in range(BLOCK, length, stride):
        end = min(start + stride, length)
        upper = sequence[start - BLOCK : end - BLOCK] & np.uint32(0x80000000)
        joined = upper | (sequence[start - BLOCK + 1 : end - BLOCK + 1] & np.uint32(0x7FFFFFFF))
        twisted = (joined >> np.uint32(1)) ^ (joined & np.uint32(1)) * np.uint32(_TWIST)
        sequence[start:end] = sequence[start - stride : end - stride] ^ twisted
    return sequence


def _jumped(words: Words, blocks: int) -> Words:
    ahead = _continued(words, _LENGTH + _GROUP)
    sums = np.zeros((1 << _GROUP, _LENGTH), dtype=np.uint32)
    for chosen in range(1, 1 << _GROUP):
        lowest = (chosen & -chosen).bit_length() - 1
        np.bitwise_xor(sums[chosen & (chosen - 1)], ahead[lowest : lowest + _LENGTH], out=sums[chosen])
    windows = np.lib.stride_tricks.sliding_window_view(sums.reshape(-1), BLOCK)
    starts, result = _starts(blocks), np.zeros(BLOCK, dtype=np.uint32)
    for first in range(0, len(starts), _AT_ONCE):
        result ^= np.bitwise_xor.reduce(windows[starts[first : first + _AT_ONCE]], axis=0)
    return result


@functools.lru_cache(maxsize=256)
def _starts(blocks: int) -> npt.NDArray[np.intp]:
    """Where in the sums the windows begin whose exclusive or is the state `blocks` blocks on."""
    coefficients = power_of_t(blocks).to_bytes(_DEGREE // 8 + 1, "little")
    bits = np.unpackbits(np.frombuffer(coefficients, dtype=np.uint8), bitorder="little")
    bits = np.concatenate([bits, np.zeros(-len(bits) % _GROUP, dtype=np.uint8)])
    chosen = bits.reshape(-1, _GROUP) @ (1 << np.arange(_GROUP))
    starts = chosen * _LENGTH + _GROUP * np.arange(len(chosen))
    return starts[chosen > 0]


def power_of_t(blocks: int) -> int:
    """t ** (624 * blocks) mod p; bit j is the coefficient of t**j."""
    value = 1
    for bit in bin(blocks)[2:]:
        value = _reduced(_squared(value) << (BLOCK if bit == "1" else 0))
    return value


def _squared(value: int) -> int:
    """Over GF(2) a square is the polynomial with its coefficients twice as far apart."""
    low = np.frombuffer(value.to_bytes(value.bit_length() // 8 + 1, "little"), dtype=np.uint8)
    bits = np.zeros((8 * len(low), 2), dtype=np.uint8)
    bits[:, 0] = np.unpackbits(low, bitorder="little")
    return int.from_bytes(np.packbits(bits.reshape(-1), bitorder="little").tobytes(), "little")


def _reduced(value: int) -> int:
    mask, exponents = (1 << _DEGREE) - 1, _lower_exponents()
    while high := value >> _DEGREE:
        value &= mask
        for exponent in exponents:
            value ^= high << exponent
    return value


@functools.cache
def characteristic_polynomial() -> int:
    """p of the twister; bit j is the coefficient of t**j.

    With y the joined words and X_i the sequence of the i-th bits, (t**624 + t**397) X_i = y_(i+1) + a_i y_0, where y_i
    is t X_i for the lower 31 bits. Put into each other from the lowest bit up, they leave p(t) X_0 = 0.
    """
    value = 1
    for bit in range(31):
        value = (value << BLOCK - 1) ^ (value << _MIDDLE - 1) ^ (_TWIST >> bit & 1)
    return (value << BLOCK) ^ (value << _MIDDLE) ^ (_TWIST >> 31)


@functools.cache
def _lower_exponents() -> tuple[int, ...]:
    polynomial = characteristic_polynomial()
    assert polynomial.bit_length() == _DEGREE + 1
    return tuple(place for place in range(_DEGREE) if polynomial >> place & 1)
